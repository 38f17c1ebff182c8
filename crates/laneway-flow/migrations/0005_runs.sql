-- Runs: start, look, cancel, go on, delete, prune.

CREATE FUNCTION pgflow._require_run(p_run_id uuid) RETURNS pgflow.runs
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_run pgflow.runs;
BEGIN
    SELECT * INTO v_run FROM pgflow.runs r WHERE r.run_id = p_run_id FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no run %', coalesce(p_run_id::text, 'NULL') USING ERRCODE = 'PF002';
    END IF;
    RETURN v_run;
END
$$;

-- The locks of many keys, in the order in which everybody takes them.
CREATE FUNCTION pgflow._lock_keys(p_flow_slug text, p_keys text[]) RETURNS void
LANGUAGE sql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
    SELECT pg_advisory_xact_lock(x.lock)
    FROM (SELECT DISTINCT hashtextextended('pgflow.key:' || p_flow_slug || ':' || k, 0) AS lock
          FROM unnest(p_keys) k WHERE k IS NOT NULL ORDER BY 1) x
$$;

-- What can be said about an input before a run of it exists. Returns the key of the run.
CREATE FUNCTION pgflow._check_input(p_flow pgflow.flows, p_input jsonb, p_key text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_key text := coalesce(p_key, p_input #>> p_flow.key_path);
    v_widest integer;
BEGIN
    IF p_input IS NULL THEN
        RAISE EXCEPTION 'the input of a run of % is NULL', quote_literal(p_flow.flow_slug) USING ERRCODE = 'PF001';
    END IF;
    PERFORM pgflow._require_payload(format('the input of a run of %L', p_flow.flow_slug), p_input);
    IF p_flow.key_path IS NOT NULL AND v_key IS NULL THEN
        RAISE EXCEPTION 'the flow % orders its runs by what is at % of the input, and this input has nothing there',
            quote_literal(p_flow.flow_slug), p_flow.key_path USING ERRCODE = 'PF007';
    END IF;
    IF length(v_key) > 500 THEN
        RAISE EXCEPTION 'the key of a run has % characters, over the limit of 500', length(v_key) USING ERRCODE = 'PF003';
    END IF;
    IF v_key IS NOT NULL AND current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'a run with a key has to be started in a transaction that is read committed: it must see the runs before it'
            USING ERRCODE = 'PF001';
    END IF;
    IF EXISTS (SELECT FROM pgflow.steps s WHERE s.flow_slug = p_flow.flow_slug AND s.step_type = 'map' AND s.deps_count = 0) THEN
        IF jsonb_typeof(p_input) <> 'array' THEN
            RAISE EXCEPTION 'the flow % begins with a map: its input has to be an array, not %', quote_literal(p_flow.flow_slug),
                jsonb_typeof(p_input) USING ERRCODE = 'PF001';
        END IF;
        v_widest := (SELECT max_map_tasks FROM pgflow.limits);
        IF jsonb_array_length(p_input) > v_widest THEN
            RAISE EXCEPTION 'a map over % elements is over the limit of %', jsonb_array_length(p_input), v_widest USING ERRCODE = 'PF003';
        END IF;
    END IF;
    RETURN v_key;
END
$$;

-- The states of new runs, then all that follows. A run has the steps that there are at this moment, and is counted by them: one that is added
-- later is not the business of runs under way.
CREATE FUNCTION pgflow._begin(p_run_ids uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_started uuid[];
    v_events jsonb[];
BEGIN
    WITH made AS (
        INSERT INTO pgflow.step_states (flow_slug, run_id, step_slug, remaining_deps, initial_tasks, created_at)
        SELECT r.flow_slug, r.run_id, s.step_slug, s.deps_count,
            CASE WHEN s.step_type = 'single' THEN 1 WHEN s.deps_count = 0 THEN jsonb_array_length(r.input) END, clock_timestamp()
        FROM unnest(p_run_ids) WITH ORDINALITY u(run_id, place)
        JOIN pgflow.runs r ON r.run_id = u.run_id
        JOIN pgflow.steps s ON s.flow_slug = r.flow_slug
        ORDER BY u.place, s.step_index
        RETURNING run_id
    )
    UPDATE pgflow.runs r SET remaining_steps = x.steps
    FROM (SELECT m.run_id, count(*)::integer AS steps FROM made m GROUP BY m.run_id) x
    WHERE r.run_id = x.run_id;
    SELECT array_agg(r.run_id ORDER BY u.place), array_agg(jsonb_build_object('event_type', 'run:started', 'run_id', r.run_id,
        'flow_slug', r.flow_slug, 'status', 'started'))
    INTO v_started, v_events
    FROM unnest(p_run_ids) WITH ORDINALITY u(run_id, place) JOIN pgflow.runs r ON r.run_id = u.run_id
    WHERE r.status = 'started';
    IF v_started IS NOT NULL THEN
        PERFORM pgflow._tell(v_events);
        PERFORM pgflow._advance(v_started);
    END IF;
END
$$;

-- Starts a run, as part of the caller's transaction. A second start with the same idempotency key returns the first run.
CREATE FUNCTION pgflow.start_flow(
    flow_slug text,
    input jsonb,
    run_id uuid DEFAULT NULL,
    idempotency_key text DEFAULT NULL,
    key text DEFAULT NULL
) RETURNS SETOF pgflow.runs
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path TO pg_catalog, pg_temp SET plan_cache_mode TO force_generic_plan SET enable_seqscan TO off SET jit TO off
AS $$
#variable_conflict use_column
DECLARE
    v_flow pgflow.flows := pgflow._require_flow(start_flow.flow_slug);
    v_key text := pgflow._check_input(v_flow, start_flow.input, start_flow.key);
    v_status text := 'started';
    v_run pgflow.runs;
BEGIN
    IF length(start_flow.idempotency_key) NOT BETWEEN 1 AND 500 THEN
        RAISE EXCEPTION 'an idempotency key has 1 to 500 characters' USING ERRCODE = 'PF001';
    END IF;
    IF v_key IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(hashtextextended('pgflow.key:' || v_flow.flow_slug || ':' || v_key, 0));
        IF EXISTS (SELECT FROM pgflow.runs r
                   WHERE r.flow_slug = v_flow.flow_slug AND r.key = v_key AND r.status IN ('started', 'waiting')) THEN
            v_status := 'waiting';
        END IF;
    END IF;
    INSERT INTO pgflow.runs AS r (run_id, flow_slug, status, input, started_at, key, idempotency_key)
    VALUES (coalesce(start_flow.run_id, pgflow._new_run_id()), v_flow.flow_slug, v_status, start_flow.input, clock_timestamp(), v_key,
        start_flow.idempotency_key)
    ON CONFLICT (flow_slug, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
    RETURNING * INTO v_run;
    IF NOT FOUND THEN
        SELECT * INTO STRICT v_run FROM pgflow.runs r
        WHERE r.flow_slug = v_flow.flow_slug AND r.idempotency_key = start_flow.idempotency_key;
        IF v_run.input <> start_flow.input THEN
            RAISE EXCEPTION 'the idempotency key % was used for a run of % with another input', quote_literal(start_flow.idempotency_key),
                quote_literal(v_flow.flow_slug) USING ERRCODE = 'PF006', DETAIL = 'It was the run ' || v_run.run_id;
        END IF;
        RETURN NEXT v_run;
        RETURN;
    END IF;
    PERFORM pgflow._begin(ARRAY[v_run.run_id]);
    RETURN QUERY SELECT * FROM pgflow.runs r WHERE r.run_id = v_run.run_id;
END
$$;

-- Starts many runs of one flow in a few statements. Their ids are in the order of the inputs.
CREATE FUNCTION pgflow.start_flows(flow_slug text, inputs jsonb[], keys text[] DEFAULT NULL) RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path TO pg_catalog, pg_temp SET plan_cache_mode TO force_generic_plan SET enable_seqscan TO off SET jit TO off
AS $$
#variable_conflict use_column
DECLARE
    v_flow pgflow.flows := pgflow._require_flow(start_flows.flow_slug);
    v_runs uuid[];
BEGIN
    IF cardinality(inputs) > 10000 OR (keys IS NOT NULL AND cardinality(keys) <> cardinality(inputs)) THEN
        RAISE EXCEPTION 'start_flows takes up to 10000 inputs, and as many keys or none' USING ERRCODE = 'PF001';
    END IF;
    IF keys IS NOT NULL OR v_flow.key_path IS NOT NULL THEN
        PERFORM pgflow._lock_keys(v_flow.flow_slug, ARRAY(
            SELECT pgflow._check_input(v_flow, u.input, u.key) FROM unnest(inputs, keys) u(input, key)));
        RETURN QUERY SELECT s.run_id FROM unnest(inputs, keys) WITH ORDINALITY u(input, key, place)
            CROSS JOIN LATERAL pgflow.start_flow(v_flow.flow_slug, u.input, key => u.key) s ORDER BY u.place;
        RETURN;
    END IF;
    PERFORM pgflow._check_input(v_flow, i, NULL) FROM unnest(inputs) i;
    WITH made AS (
        INSERT INTO pgflow.runs AS r (run_id, flow_slug, input, started_at)
        SELECT pgflow._new_run_id(), v_flow.flow_slug, u.input, clock_timestamp()
        FROM unnest(inputs) WITH ORDINALITY u(input, place) ORDER BY u.place
        RETURNING r.run_id, r.seq
    )
    SELECT array_agg(m.run_id ORDER BY m.seq) INTO v_runs FROM made m;
    IF v_runs IS NOT NULL THEN
        PERFORM pgflow._begin(v_runs);
    END IF;
    RETURN QUERY SELECT unnest(v_runs);
END
$$;

CREATE FUNCTION pgflow.get_run_with_states(run_id uuid) RETURNS jsonb
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object('run', to_jsonb(r), 'steps', (
        SELECT coalesce(jsonb_agg(to_jsonb(s) ORDER BY p.step_index), '[]')
        FROM pgflow.step_states s JOIN pgflow.steps p ON p.flow_slug = s.flow_slug AND p.step_slug = s.step_slug
        WHERE s.run_id = r.run_id))
    FROM pgflow.runs r WHERE r.run_id = get_run_with_states.run_id
$$;

CREATE FUNCTION pgflow.start_flow_with_states(flow_slug text, input jsonb, run_id uuid DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_run pgflow.runs;
BEGIN
    SELECT * INTO v_run FROM pgflow.start_flow(start_flow_with_states.flow_slug, start_flow_with_states.input, start_flow_with_states.run_id);
    RETURN pgflow.get_run_with_states(v_run.run_id);
END
$$;

-- Ends a run. False: it had ended already.
CREATE FUNCTION pgflow.cancel_run(run_id uuid, reason text DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_run pgflow.runs := pgflow._require_run(cancel_run.run_id);
BEGIN
    IF v_run.status NOT IN ('started', 'waiting') THEN
        RETURN false;
    END IF;
    PERFORM pgflow._end_run(v_run.run_id, 'cancelled', NULL, coalesce(left(reason, 10000), 'by hand'));
    -- One that waited was in nobody's way.
    IF v_run.status = 'started' THEN
        PERFORM pgflow._advance(pgflow._next_of_key(ARRAY[v_run.run_id]));
    END IF;
    RETURN true;
END
$$;

CREATE FUNCTION pgflow.cancel_flow(flow_slug text) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_flow pgflow.flows := pgflow._require_flow(cancel_flow.flow_slug);
    v_run record;
    v_runs uuid[];
    v_count integer := 0;
BEGIN
    -- Those that there are now: others could not be locked in their order any more.
    v_runs := ARRAY(SELECT r.run_id FROM pgflow.runs r
        WHERE r.flow_slug = v_flow.flow_slug AND r.status IN ('started', 'waiting') ORDER BY r.run_id FOR UPDATE);
    -- Those that wait are cancelled first: else each would get its turn when the one before it goes.
    FOR v_run IN
        SELECT r.run_id FROM pgflow.runs r WHERE r.flow_slug = v_flow.flow_slug AND r.status IN ('started', 'waiting')
          AND r.run_id = ANY (v_runs)
        ORDER BY r.status = 'started', r.run_id
    LOOP
        v_count := v_count + pgflow.cancel_run(v_run.run_id, 'the flow was cancelled')::integer;
    END LOOP;
    RETURN v_count;
END
$$;

-- Takes messages out of the archive of their queue.
CREATE FUNCTION pgflow._forget_messages(p_queue text, p_message_ids bigint[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    IF to_regclass(format('pgmq.%I', 'a_' || p_queue)) IS NOT NULL THEN
        EXECUTE format('DELETE FROM pgmq.%I WHERE msg_id = ANY ($1)', 'a_' || p_queue) USING p_message_ids;
    END IF;
END
$$;

-- Lets a failed or cancelled run go on where it ended: what was completed stays, what was not is done again with all of its attempts. A
-- run with a key waits for its turn. False: the run had not ended so.
CREATE FUNCTION pgflow.retry_run(run_id uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_run pgflow.runs := pgflow._require_run(retry_run.run_id);
    v_status text := 'started';
    v_at timestamptz := clock_timestamp();
BEGIN
    IF v_run.status NOT IN ('failed', 'cancelled') THEN
        RETURN false;
    END IF;
    IF v_run.key IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(hashtextextended('pgflow.key:' || v_run.flow_slug || ':' || v_run.key, 0));
        IF EXISTS (SELECT FROM pgflow.runs r
                   WHERE r.flow_slug = v_run.flow_slug AND r.key = v_run.key AND r.status IN ('started', 'waiting')) THEN
            v_status := 'waiting';
        END IF;
    END IF;
    -- They get new messages; the old ones would be known to nobody.
    PERFORM pgflow._forget_messages(x.queue, x.ids) FROM (
        SELECT t.queue, array_agg(t.message_id) AS ids
        FROM pgflow.step_tasks t JOIN pgflow.step_states s ON s.run_id = t.run_id AND s.step_slug = t.step_slug
        WHERE t.run_id = v_run.run_id AND t.status = 'failed' AND t.message_id IS NOT NULL
          AND (s.status = 'failed' OR s.skip_reason IN ('run_failed', 'run_cancelled'))
        GROUP BY t.queue ORDER BY t.queue) x;
    -- Tasks that were made and not completed wait again, where their step sends them now. Those by hand are in somebody's hands again.
    UPDATE pgflow.step_tasks t
    SET status = CASE WHEN n.queue IS NULL THEN 'started' ELSE 'queued' END,
        attempts_count = CASE WHEN n.queue IS NULL THEN 1 ELSE 0 END,
        queued_at = v_at, started_at = CASE WHEN n.queue IS NULL THEN v_at END,
        start_number = CASE WHEN n.queue IS NULL THEN nextval('pgflow.start_numbers') ELSE t.start_number END,
        queue = n.queue, message_id = NULL, error_message = NULL, failed_at = NULL, requeued_count = 0, permanently_stalled_at = NULL, extended_until = NULL
    FROM pgflow.step_states s, (
        SELECT p.step_slug, pgflow._resolve_queue(p.queue, f.queue, f.flow_slug) AS queue
        FROM pgflow.steps p JOIN pgflow.flows f ON f.flow_slug = p.flow_slug WHERE p.flow_slug = v_run.flow_slug) n
    WHERE t.run_id = v_run.run_id AND t.status = 'failed' AND s.run_id = t.run_id AND s.step_slug = t.step_slug AND n.step_slug = t.step_slug
      AND (s.status = 'failed' OR s.skip_reason IN ('run_failed', 'run_cancelled'));
    UPDATE pgflow.step_states s
    SET status = CASE WHEN x.tasks > 0 THEN 'started' ELSE 'created' END,
        remaining_tasks = CASE WHEN x.tasks > 0 THEN x.remaining END,
        started_at = CASE WHEN x.tasks > 0 THEN s.started_at END,
        failed_at = NULL, skipped_at = NULL, skip_reason = NULL, error_message = NULL
    FROM (SELECT z.step_slug, count(t.task_index)::integer AS tasks,
              count(t.task_index) FILTER (WHERE t.status <> 'completed')::integer AS remaining
          FROM pgflow.step_states z LEFT JOIN pgflow.step_tasks t ON t.run_id = z.run_id AND t.step_slug = z.step_slug
          WHERE z.run_id = v_run.run_id GROUP BY z.step_slug) x
    WHERE s.run_id = v_run.run_id AND s.step_slug = x.step_slug
      AND (s.status = 'failed' OR s.skip_reason IN ('run_failed', 'run_cancelled'));
    UPDATE pgflow.runs r
    SET status = v_status, failed_at = NULL, cancelled_at = NULL, error_message = NULL
    WHERE r.run_id = v_run.run_id;
    IF v_status = 'started' THEN
        PERFORM pgflow._tell(ARRAY[jsonb_build_object('event_type', 'run:started', 'run_id', v_run.run_id,
            'flow_slug', v_run.flow_slug, 'status', 'started')]);
        PERFORM pgflow._resume(ARRAY[v_run.run_id]);
        PERFORM pgflow._advance(ARRAY[v_run.run_id]);
    END IF;
    RETURN true;
END
$$;

CREATE FUNCTION pgflow.retry_flow(flow_slug text) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_flow pgflow.flows := pgflow._require_flow(retry_flow.flow_slug);
    v_run record;
    v_count integer := 0;
BEGIN
    -- All are locked, by run_id, before the first is touched; then they go in the order in which they were started.
    PERFORM 1 FROM pgflow.runs r WHERE r.flow_slug = v_flow.flow_slug AND r.status = 'failed' ORDER BY r.run_id FOR UPDATE;
    PERFORM pgflow._lock_keys(v_flow.flow_slug, ARRAY(
        SELECT r.key FROM pgflow.runs r WHERE r.flow_slug = v_flow.flow_slug AND r.status = 'failed' AND r.key IS NOT NULL));
    FOR v_run IN SELECT r.run_id FROM pgflow.runs r WHERE r.flow_slug = v_flow.flow_slug AND r.status = 'failed' ORDER BY r.seq LOOP
        v_count := v_count + pgflow.retry_run(v_run.run_id)::integer;
    END LOOP;
    RETURN v_count;
END
$$;

-- Removes runs that have ended, with all that is known of them. They are locked.
CREATE FUNCTION pgflow._forget(p_run_ids uuid[]) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_count bigint;
BEGIN
    -- What is in the archives of their queues is known by the tasks.
    PERFORM pgflow._forget_messages(x.queue, x.ids) FROM (
        SELECT t.queue, array_agg(t.message_id) AS ids FROM pgflow.step_tasks t
        WHERE t.run_id = ANY (p_run_ids) AND t.message_id IS NOT NULL GROUP BY t.queue ORDER BY t.queue) x;
    DELETE FROM pgflow.step_tasks t WHERE t.run_id = ANY (p_run_ids);
    DELETE FROM pgflow.step_states s WHERE s.run_id = ANY (p_run_ids);
    DELETE FROM pgflow.runs r WHERE r.run_id = ANY (p_run_ids);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$$;

-- A run that has not ended is cancelled first. False: there is none.
CREATE FUNCTION pgflow.delete_run(run_id uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM 1 FROM pgflow.runs r WHERE r.run_id = delete_run.run_id FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM pgflow.cancel_run(delete_run.run_id, 'the run is deleted');
    RETURN pgflow._forget(ARRAY[delete_run.run_id]) > 0;
END
$$;

-- Removes a flow, its steps and its runs, and the queues that nothing else uses. It waits until nobody else works on any run, at most
-- ten seconds: it touches runs of all keys and orders, and would otherwise have to be tried again.
CREATE FUNCTION pgflow.delete_flow_and_data(p_flow_slug text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp SET lock_timeout TO '10s'
AS $$
DECLARE
    v_flow pgflow.flows := pgflow._require_flow(p_flow_slug);
    v_queues text[] := ARRAY(SELECT pgflow.flow_queues(p_flow_slug));
    v_queue text;
BEGIN
    LOCK TABLE pgflow.runs IN EXCLUSIVE MODE;
    -- Queues that steps had before they were routed elsewhere.
    v_queues := ARRAY(SELECT DISTINCT q FROM (
        SELECT unnest(v_queues) UNION
        SELECT t.queue FROM pgflow.step_tasks t JOIN pgflow.runs r ON r.run_id = t.run_id
        WHERE r.flow_slug = p_flow_slug AND t.queue IS NOT NULL) x(q) ORDER BY q);
    PERFORM pgflow._end_run(r.run_id, 'cancelled', NULL, 'the flow is deleted')
    FROM pgflow.runs r WHERE r.flow_slug = p_flow_slug AND r.status IN ('started', 'waiting');
    PERFORM pgflow._forget(ARRAY(SELECT r.run_id FROM pgflow.runs r WHERE r.flow_slug = p_flow_slug));
    DELETE FROM pgflow.deps d WHERE d.flow_slug = p_flow_slug;
    DELETE FROM pgflow.steps s WHERE s.flow_slug = p_flow_slug;
    DELETE FROM pgflow.flows f WHERE f.flow_slug = p_flow_slug;
    FOREACH v_queue IN ARRAY v_queues LOOP
        CONTINUE WHEN NOT pgflow._queue_exists(v_queue)
            OR EXISTS (SELECT FROM pgflow.flows f LEFT JOIN pgflow.steps s ON s.flow_slug = f.flow_slug
                       WHERE v_queue IN (pgflow._resolve_queue(s.queue, f.queue, f.flow_slug), pgflow._resolve_queue(NULL, f.queue, f.flow_slug)))
            OR EXISTS (SELECT FROM pgflow.step_tasks t WHERE t.queue = v_queue)
            OR pgflow._queue_has_messages(v_queue);
        PERFORM pgmq.drop_queue(v_queue);
        DELETE FROM pgflow.queues q WHERE q.queue = v_queue;
    END LOOP;
END
$$;

-- A message that is not ours keeps its queue alive.
CREATE FUNCTION pgflow._queue_has_messages(p_queue text) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_found boolean;
BEGIN
    EXECUTE format('SELECT EXISTS (SELECT FROM pgmq.%I)', 'q_' || p_queue) INTO v_found;
    RETURN v_found;
END
$$;

-- Removes runs that ended longer ago than this, oldest first, at most so many: call it until it returns 0. Workers that were last heard of
-- before that go as well.
CREATE FUNCTION pgflow.prune_data_older_than(retention interval, flow_slug text DEFAULT NULL, max_runs integer DEFAULT 10000) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_before timestamptz := clock_timestamp() - retention;
    v_runs uuid[];
BEGIN
    IF retention < interval '0' OR max_runs < 1 THEN
        RAISE EXCEPTION 'retention and max_runs have to be positive' USING ERRCODE = 'PF001';
    END IF;
    IF prune_data_older_than.flow_slug IS NOT NULL THEN
        PERFORM pgflow._require_flow(prune_data_older_than.flow_slug);
    END IF;
    v_runs := ARRAY(
        SELECT r.run_id FROM pgflow.runs r
        WHERE r.status IN ('completed', 'failed', 'cancelled') AND coalesce(r.completed_at, r.failed_at, r.cancelled_at) < v_before
          AND (prune_data_older_than.flow_slug IS NULL OR r.flow_slug = prune_data_older_than.flow_slug)
        ORDER BY r.run_id LIMIT max_runs FOR UPDATE SKIP LOCKED);
    -- Not those of the last hour, however short the retention: one that was taken for dead may still come back and read.
    DELETE FROM pgflow.workers w
    WHERE w.stopped_at IS NOT NULL AND greatest(w.stopped_at, w.last_heartbeat_at) < least(v_before, clock_timestamp() - interval '1 hour');
    RETURN pgflow._forget(v_runs);
END
$$;
