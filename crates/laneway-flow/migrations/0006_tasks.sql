-- Tasks: read and start, complete, fail, hand back, extend, and what happens to those whose worker went away.

CREATE FUNCTION pgflow.calculate_retry_delay(base_delay numeric, attempts_count integer) RETURNS integer
LANGUAGE sql IMMUTABLE SET search_path TO pg_catalog, pg_temp
AS $$
    -- A day at most: beyond that, nobody waits for a retry.
    SELECT least(floor(base_delay * power(2::numeric, least(attempts_count, 30))), greatest(86400, base_delay))::integer
$$;

-- What a task works on. A map: its element. A step that depends on others: their outputs by name. One that does not: {}.
CREATE FUNCTION pgflow._task_input(p_run_id uuid, p_flow_slug text, p_step_slug text) RETURNS jsonb
LANGUAGE sql STABLE SET search_path TO pg_catalog, pg_temp
AS $$
    SELECT coalesce(jsonb_object_agg(d.dep_slug, s.output), '{}')
    FROM pgflow.deps d
    JOIN pgflow.step_states s ON s.run_id = p_run_id AND s.step_slug = d.dep_slug AND s.status = 'completed'
    WHERE d.flow_slug = p_flow_slug AND d.step_slug = p_step_slug
$$;

-- Marks as started what is queued and has one of these messages, and hides the messages for as long as the tasks may take. The caller has
-- the messages, or names them. Returns the messages whose tasks were started.
CREATE FUNCTION pgflow._start(p_queue text, p_message_ids bigint[], p_worker_id uuid, p_visibility integer) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_started bigint[];
BEGIN
    EXECUTE format($q$
        WITH mine AS (
            SELECT q.msg_id FROM pgmq.%1$I q WHERE q.msg_id = ANY ($1) ORDER BY q.msg_id FOR UPDATE SKIP LOCKED
        ), started AS (
            UPDATE pgflow.step_tasks t
            SET status = 'started', attempts_count = t.attempts_count + 1, started_at = greatest(clock_timestamp(), t.queued_at),
                last_worker_id = $2, extended_until = clock_timestamp() + make_interval(secs => $3),
                start_number = nextval('pgflow.start_numbers')
            FROM mine m
            WHERE t.queue = $4 AND t.message_id = m.msg_id AND t.status = 'queued'
            RETURNING t.message_id, t.flow_slug, t.step_slug
        ), hidden AS (
            UPDATE pgmq.%1$I q
            SET vt = clock_timestamp() + make_interval(secs => greatest(coalesce(p.opt_timeout, f.opt_timeout) + 2, $3))
            FROM started s
            JOIN pgflow.steps p ON p.flow_slug = s.flow_slug AND p.step_slug = s.step_slug
            JOIN pgflow.flows f ON f.flow_slug = s.flow_slug
            WHERE q.msg_id = s.message_id
        )
        SELECT array_agg(s.message_id) FROM started s$q$, 'q_' || p_queue)
        INTO v_started USING p_message_ids, p_worker_id, p_visibility, p_queue;
    RETURN v_started;
END
$$;

-- The second half of the original's poll, by queue. Tasks that are started already are not started again.
CREATE FUNCTION pgflow.start_tasks(queue_name text, msg_ids bigint[], worker_id uuid) RETURNS SETOF pgflow.step_task_record
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path TO pg_catalog, pg_temp SET plan_cache_mode TO force_generic_plan SET enable_seqscan TO off SET jit TO off
AS $$
DECLARE
    v_queue text := pgflow._queue_name(queue_name);
    v_ids bigint[];
BEGIN
    PERFORM pgflow._require_queue(v_queue);
    v_ids := pgflow._start(v_queue, msg_ids, start_tasks.worker_id, NULL);
    RETURN QUERY
    SELECT t.flow_slug, t.run_id, t.step_slug,
        CASE p.step_type WHEN 'map' THEN t.element ELSE pgflow._task_input(t.run_id, t.flow_slug, t.step_slug) END,
        t.message_id, t.task_index, CASE p.step_type WHEN 'single' THEN r.input END, t.start_number
    FROM pgflow.step_tasks t
    JOIN pgflow.steps p ON p.flow_slug = t.flow_slug AND p.step_slug = t.step_slug
    JOIN pgflow.runs r ON r.run_id = t.run_id
    WHERE t.queue = v_queue AND t.message_id = ANY (v_ids)
    ORDER BY t.message_id;
END
$$;

-- The form of the original's 0.17: only tasks of this flow.
CREATE FUNCTION pgflow.start_tasks(flow_slug text, msg_ids bigint[], worker_id uuid, queue_name text) RETURNS SETOF pgflow.step_task_record
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path TO pg_catalog, pg_temp SET plan_cache_mode TO force_generic_plan SET enable_seqscan TO off SET jit TO off
AS $$
DECLARE
    v_queue text := pgflow._queue_name(start_tasks.queue_name);
BEGIN
    RETURN QUERY SELECT * FROM pgflow.start_tasks(v_queue,
        ARRAY(SELECT t.message_id FROM pgflow.step_tasks t
              WHERE t.queue = v_queue AND t.message_id = ANY (start_tasks.msg_ids) AND t.flow_slug = start_tasks.flow_slug),
        start_tasks.worker_id);
END
$$;

CREATE FUNCTION pgflow.read_with_poll(
    queue_name text,
    vt integer DEFAULT 2,
    qty integer DEFAULT 1,
    max_poll_seconds integer DEFAULT 2,
    poll_interval_ms integer DEFAULT 250
) RETURNS SETOF pgmq.message_record
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_queue text := pgflow._queue_name(queue_name);
BEGIN
    PERFORM pgflow._require_queue(v_queue);
    RETURN QUERY SELECT * FROM pgmq.read_with_poll(v_queue, vt, qty, max_poll_seconds, poll_interval_ms);
END
$$;

CREATE FUNCTION pgflow.poll_for_tasks(
    queue_name text,
    vt integer,
    qty integer,
    max_poll_seconds integer DEFAULT 5,
    poll_interval_ms integer DEFAULT 100
) RETURNS SETOF pgflow.step_task_record
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT * FROM pgflow.start_tasks(poll_for_tasks.queue_name,
        ARRAY(SELECT m.msg_id FROM pgflow.read_with_poll(poll_for_tasks.queue_name, poll_for_tasks.vt, poll_for_tasks.qty,
            poll_for_tasks.max_poll_seconds, poll_for_tasks.poll_interval_ms) m), NULL);
END
$$;

CREATE FUNCTION pgflow.set_vt_batch(queue_name text, msg_ids bigint[], vt_offsets integer[])
RETURNS TABLE (msg_id bigint, read_ct integer, enqueued_at timestamptz, vt timestamptz, message jsonb, headers jsonb)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_queue text := pgflow._queue_name(queue_name);
BEGIN
    PERFORM pgflow._require_queue(v_queue);
    IF cardinality(msg_ids) <> cardinality(vt_offsets) THEN
        RAISE EXCEPTION 'set_vt_batch wants as many offsets as messages' USING ERRCODE = 'PF001';
    END IF;
    RETURN QUERY EXECUTE format($q$
        UPDATE pgmq.%I q SET vt = clock_timestamp() + make_interval(secs => u.seconds)
        FROM unnest($1, $2) u(id, seconds) WHERE q.msg_id = u.id
        RETURNING q.msg_id, q.read_ct, q.enqueued_at, q.vt, q.message, q.headers$q$, 'q_' || v_queue)
        USING msg_ids, vt_offsets;
END
$$;

-- Reads up to so many messages from each of these queues and starts their tasks, in one call that never waits, and not more than p_total
-- in all; a queue may be named twice, to have a second turn at what the others left. With flows named, messages of other flows in a shared
-- queue are left to others; so are those of steps that the worker has no handler for, each named as flow.step: two workers look at a queue in
-- step with each other, and the one that cannot do a task could else be the first at it every time. Rows come in the order of the queues, then
-- of visibility.
--
-- What else may be in a queue: a message whose task is started (its worker is slow, or gone: others decide that), which is put off
-- for a while; a message of ours without a task that could be started, which is put away; a message that is not ours, which is put off.
CREATE FUNCTION pgflow.read_and_start(
    p_queues text[],
    p_limits integer[],
    p_worker_id uuid,
    p_flow_slugs text[] DEFAULT NULL,
    p_visibility integer[] DEFAULT NULL,
    p_total integer DEFAULT NULL,
    p_strange_steps text[] DEFAULT NULL
) RETURNS TABLE (queue text, msg_id bigint, flow_slug text, run_id uuid, step_slug text, task_index integer, input jsonb, flow_input jsonb,
    attempts_count integer, max_attempts integer, timeout integer, step_type text, key text, start_number bigint)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path TO pg_catalog, pg_temp SET plan_cache_mode TO force_generic_plan SET enable_seqscan TO off SET jit TO off
AS $$
#variable_conflict use_column
DECLARE
    v_place integer;
    v_queue text;
    v_runs uuid[];
    v_steps text[];
    v_indexes integer[];
    v_orphans bigint[];
    v_all_runs uuid[] := '{}';
    v_all_steps text[] := '{}';
    v_all_indexes integer[] := '{}';
BEGIN
    IF cardinality(p_queues) <> cardinality(p_limits) OR cardinality(p_queues) <> coalesce(cardinality(p_visibility), cardinality(p_queues)) THEN
        RAISE EXCEPTION 'read_and_start wants a limit for each queue, and as many visibilities or none' USING ERRCODE = 'PF001';
    END IF;
    FOR v_place IN 1 .. coalesce(cardinality(p_queues), 0) LOOP
        CONTINUE WHEN p_limits[v_place] <= 0;
        EXIT WHEN cardinality(v_all_runs) >= p_total;
        v_queue := pgflow._queue_name(p_queues[v_place]);
        PERFORM pgflow._require_queue(v_queue);
        EXECUTE format($q$
            WITH picked AS (
                SELECT q.msg_id, q.vt, q.message ? 'run_id' AS ours FROM pgmq.%1$I q
                WHERE q.vt <= clock_timestamp() AND ($4 IS NULL OR q.message ->> 'flow_slug' = ANY ($4))
                  AND ($6 IS NULL OR coalesce((q.message ->> 'flow_slug') || '.' || (q.message ->> 'step_slug'), '') <> ALL ($6))
                ORDER BY q.vt LIMIT $1 FOR UPDATE SKIP LOCKED
            ), matched AS (
                SELECT m.msg_id, m.ours, t.run_id, t.step_slug, t.task_index, t.status,
                    CASE WHEN t.status = 'queued' THEN greatest(coalesce(p.opt_timeout, f.opt_timeout) + 2, $5)
                         WHEN t.status = 'started' THEN 5 ELSE 60 END AS hide
                FROM picked m
                LEFT JOIN pgflow.step_tasks t ON t.queue = $2 AND t.message_id = m.msg_id
                LEFT JOIN pgflow.steps p ON p.flow_slug = t.flow_slug AND p.step_slug = t.step_slug
                LEFT JOIN pgflow.flows f ON f.flow_slug = t.flow_slug
            ), hidden AS (
                UPDATE pgmq.%1$I q SET vt = clock_timestamp() + make_interval(secs => m.hide), read_ct = q.read_ct + 1
                FROM matched m WHERE q.msg_id = m.msg_id
            ), started AS (
                UPDATE pgflow.step_tasks t
                SET status = 'started', attempts_count = t.attempts_count + 1, started_at = greatest(clock_timestamp(), t.queued_at),
                    last_worker_id = $3, extended_until = clock_timestamp() + make_interval(secs => $5),
                    start_number = nextval('pgflow.start_numbers')
                FROM matched m
                WHERE m.status = 'queued' AND t.run_id = m.run_id AND t.step_slug = m.step_slug AND t.task_index = m.task_index
                  AND t.status = 'queued'
                RETURNING t.run_id, t.step_slug, t.task_index, t.message_id
            )
            SELECT array_agg(s.run_id ORDER BY m.vt), array_agg(s.step_slug ORDER BY m.vt), array_agg(s.task_index ORDER BY m.vt),
                (SELECT array_agg(o.msg_id) FROM matched o WHERE o.ours AND coalesce(o.status, 'failed') IN ('completed', 'failed'))
            FROM started s JOIN picked m ON m.msg_id = s.message_id$q$, 'q_' || v_queue)
            INTO v_runs, v_steps, v_indexes, v_orphans
            USING least(p_limits[v_place], p_total - cardinality(v_all_runs)), v_queue, p_worker_id, p_flow_slugs, p_visibility[v_place],
                nullif(p_strange_steps, '{}');
        v_all_runs := v_all_runs || coalesce(v_runs, '{}');
        v_all_steps := v_all_steps || coalesce(v_steps, '{}');
        v_all_indexes := v_all_indexes || coalesce(v_indexes, '{}');
        PERFORM pgflow._archive(v_queue, v_orphans);
    END LOOP;
    IF cardinality(v_all_runs) = 0 THEN
        RETURN;
    END IF;
    RETURN QUERY
    SELECT t.queue, t.message_id, t.flow_slug, t.run_id, t.step_slug, t.task_index,
        CASE WHEN p.step_type = 'map' THEN t.element
             WHEN p.deps_count = 0 THEN '{}'
             ELSE (SELECT coalesce(jsonb_object_agg(d.dep_slug, s.output), '{}')
                   FROM pgflow.deps d
                   JOIN pgflow.step_states s ON s.run_id = t.run_id AND s.step_slug = d.dep_slug AND s.status = 'completed'
                   WHERE d.flow_slug = t.flow_slug AND d.step_slug = t.step_slug) END,
        CASE p.step_type WHEN 'single' THEN r.input END,
        t.attempts_count, coalesce(p.opt_max_attempts, f.opt_max_attempts), coalesce(p.opt_timeout, f.opt_timeout), p.step_type, r.key,
        t.start_number
    FROM unnest(v_all_runs, v_all_steps, v_all_indexes) WITH ORDINALITY u(run_id, step_slug, task_index, place)
    JOIN pgflow.step_tasks t ON t.run_id = u.run_id AND t.step_slug = u.step_slug AND t.task_index = u.task_index
    JOIN pgflow.steps p ON p.flow_slug = t.flow_slug AND p.step_slug = t.step_slug
    JOIN pgflow.flows f ON f.flow_slug = t.flow_slug
    JOIN pgflow.runs r ON r.run_id = t.run_id
    ORDER BY u.place;
END
$$;

CREATE FUNCTION pgflow._require_equal_lengths(p_what text, VARIADIC p_lengths integer[]) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    IF p_lengths[1] <> ALL (p_lengths) OR array_position(p_lengths, NULL) IS NOT NULL THEN
        RAISE EXCEPTION '% wants arrays of one length', p_what USING ERRCODE = 'PF001';
    END IF;
END
$$;

-- Completes many tasks and does all that follows from it, as one transaction. A row for each, in order:
--   completed       it is done
--   ignored         it was not this caller's to complete any more: completed, failed, or requeued before, or its run has ended
--   too_large       its output is over the limit; nothing was done, so fail it
--   run_too_large   the outputs of its run together would be over the limit; nothing was done, so fail it
--   type_violation  a map waits for it, and its output is no array: it and its run have failed
--
-- With p_starts, each row is of one start: one that has lost its task to a later start is ignored.
CREATE FUNCTION pgflow.complete_tasks(p_run_ids uuid[], p_step_slugs text[], p_task_indexes integer[], p_outputs jsonb[],
    p_starts bigint[] DEFAULT NULL)
RETURNS TABLE (run_id uuid, step_slug text, task_index integer, outcome text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path TO pg_catalog, pg_temp SET plan_cache_mode TO force_generic_plan SET enable_seqscan TO off SET jit TO off
AS $$
#variable_conflict use_column
DECLARE
    v_limit integer := (SELECT max_payload_bytes FROM pgflow.limits);
    v_run_limit bigint := (SELECT max_run_output_bytes FROM pgflow.limits);
    v_widest integer := (SELECT max_map_tasks FROM pgflow.limits);
    v_outcomes text[];
    v_done_runs uuid[];
    v_done_steps text[];
    v_events jsonb[];
    v_runs uuid[];
    v_bad record;
BEGIN
    PERFORM pgflow._require_equal_lengths('complete_tasks', cardinality(p_run_ids), cardinality(p_step_slugs),
        cardinality(p_task_indexes), cardinality(p_outputs), coalesce(cardinality(p_starts), cardinality(p_run_ids)));
    -- From here on nobody else decides about these runs.
    v_runs := ARRAY(SELECT r.run_id FROM pgflow.runs r WHERE r.run_id = ANY (p_run_ids) AND r.status = 'started' ORDER BY r.run_id FOR UPDATE);

    SELECT array_agg(CASE
            WHEN x.task IS NULL OR x.again > 1 THEN 'ignored'
            WHEN x.bytes > v_limit THEN 'too_large'
            WHEN x.total > v_run_limit THEN 'run_too_large'
            WHEN x.feeds_map AND (jsonb_typeof(x.output) IS DISTINCT FROM 'array' OR jsonb_array_length(x.output) > v_widest) THEN 'type_violation'
            ELSE 'completed' END ORDER BY x.place)
    INTO v_outcomes
    FROM (
        SELECT u.place, u.output, t.run_id AS task, pg_column_size(u.output) AS bytes,
            -- What the run has, and what it would get from here and the rows before.
            had.bytes + sum(CASE WHEN t.run_id IS NOT NULL AND pg_column_size(u.output) <= v_limit THEN pg_column_size(u.output) ELSE 0 END)
                OVER (PARTITION BY u.run_id ORDER BY u.place) AS total,
            row_number() OVER (PARTITION BY u.run_id, u.step_slug, u.task_index ORDER BY u.place) AS again,
            t.step_type = 'single' AND EXISTS (
                SELECT FROM pgflow.deps d JOIN pgflow.steps c ON c.flow_slug = d.flow_slug AND c.step_slug = d.step_slug
                JOIN pgflow.step_states cs ON cs.run_id = t.run_id AND cs.step_slug = d.step_slug
                WHERE d.flow_slug = t.flow_slug AND d.dep_slug = t.step_slug AND c.step_type = 'map') AS feeds_map
        FROM unnest(p_run_ids, p_step_slugs, p_task_indexes, p_outputs, p_starts)
            WITH ORDINALITY u(run_id, step_slug, task_index, output, start_number, place)
        -- One task after another by its key, whatever the planner believes of the number of tasks that are started (OFFSET keeps it from that).
        LEFT JOIN LATERAL (SELECT k.run_id, k.flow_slug, k.step_slug, k.status, k.start_number, p.step_type, r.status AS run_status
            FROM pgflow.step_tasks k
            JOIN pgflow.steps p ON p.flow_slug = k.flow_slug AND p.step_slug = k.step_slug
            JOIN pgflow.runs r ON r.run_id = k.run_id
            WHERE k.run_id = u.run_id AND k.step_slug = u.step_slug AND k.task_index = u.task_index OFFSET 0) t
          ON t.run_status = 'started' AND t.status = 'started' AND (u.start_number IS NULL OR u.start_number = t.start_number)
        LEFT JOIN (SELECT s.run_id, sum(s.output_bytes) AS bytes FROM pgflow.step_states s WHERE s.run_id = ANY (v_runs) GROUP BY s.run_id) had
          ON had.run_id = u.run_id) x;

    PERFORM pgflow._archive(x.queue, x.ids) FROM (
        SELECT t.queue, array_agg(t.message_id) AS ids
        FROM unnest(p_run_ids, p_step_slugs, p_task_indexes, v_outcomes) u(run_id, step_slug, task_index, outcome)
        JOIN pgflow.step_tasks t ON t.run_id = u.run_id AND t.step_slug = u.step_slug AND t.task_index = u.task_index
        WHERE u.outcome = 'completed' AND t.message_id IS NOT NULL
        GROUP BY t.queue ORDER BY t.queue) x;

    UPDATE pgflow.step_tasks t
    SET status = 'completed', completed_at = greatest(clock_timestamp(), t.started_at), output = u.output, error_message = NULL
    FROM unnest(p_run_ids, p_step_slugs, p_task_indexes, p_outputs, v_outcomes) u(run_id, step_slug, task_index, output, outcome)
    WHERE u.outcome = 'completed' AND t.run_id = u.run_id AND t.step_slug = u.step_slug AND t.task_index = u.task_index;

    WITH counted AS (
        SELECT u.run_id, u.step_slug, count(*)::integer AS tasks, sum(pg_column_size(u.output)) AS bytes
        FROM unnest(p_run_ids, p_step_slugs, p_outputs, v_outcomes) u(run_id, step_slug, output, outcome)
        WHERE u.outcome = 'completed' GROUP BY u.run_id, u.step_slug
    ), updated AS (
        UPDATE pgflow.step_states s
        SET remaining_tasks = s.remaining_tasks - c.tasks,
            output_bytes = s.output_bytes + coalesce(c.bytes, 0),
            status = CASE WHEN s.remaining_tasks = c.tasks THEN 'completed' ELSE s.status END,
            completed_at = CASE WHEN s.remaining_tasks = c.tasks THEN greatest(clock_timestamp(), s.started_at) END,
            output = CASE WHEN s.remaining_tasks = c.tasks THEN
                CASE p.step_type
                    WHEN 'single' THEN (SELECT t.output FROM pgflow.step_tasks t
                        WHERE t.run_id = s.run_id AND t.step_slug = s.step_slug AND t.task_index = 0)
                    ELSE (SELECT jsonb_agg(t.output ORDER BY t.task_index) FROM pgflow.step_tasks t
                        WHERE t.run_id = s.run_id AND t.step_slug = s.step_slug) END
                END
        FROM counted c, pgflow.steps p
        WHERE s.run_id = c.run_id AND s.step_slug = c.step_slug AND p.flow_slug = s.flow_slug AND p.step_slug = s.step_slug
        RETURNING s.run_id, s.step_slug, s.flow_slug, s.status
    )
    SELECT array_agg(x.run_id), array_agg(x.step_slug), array_agg(jsonb_build_object('event_type', 'step:completed', 'run_id', x.run_id,
        'flow_slug', x.flow_slug, 'step_slug', x.step_slug, 'status', 'completed'))
    INTO v_done_runs, v_done_steps, v_events
    FROM updated x WHERE x.status = 'completed';

    FOR v_bad IN
        SELECT u.run_id, u.step_slug, u.task_index, jsonb_typeof(u.output) AS kind,
            CASE jsonb_typeof(u.output) WHEN 'array' THEN jsonb_array_length(u.output) END AS width
        FROM unnest(p_run_ids, p_step_slugs, p_task_indexes, p_outputs, v_outcomes) u(run_id, step_slug, task_index, output, outcome)
        WHERE u.outcome = 'type_violation' ORDER BY u.run_id, u.step_slug
    LOOP
        PERFORM pgflow._end_run(v_bad.run_id, 'failed', v_bad.step_slug, CASE WHEN v_bad.width IS NULL
            THEN format('TYPE_VIOLATION: the output of the step %L has to be an array, because a map depends on it, and is %s',
                v_bad.step_slug, coalesce(v_bad.kind, 'NULL'))
            ELSE format('TYPE_VIOLATION: the output of the step %L has %s elements, and a map at most %s', v_bad.step_slug, v_bad.width, v_widest) END);
    END LOOP;

    IF v_done_runs IS NOT NULL THEN
        PERFORM pgflow._tell(v_events);
        PERFORM pgflow._release(v_done_runs, v_done_steps);
    END IF;
    IF v_done_runs IS NOT NULL OR 'type_violation' = ANY (v_outcomes) THEN
        PERFORM pgflow._advance(v_runs);
    END IF;
    RETURN QUERY SELECT u.* FROM unnest(p_run_ids, p_step_slugs, p_task_indexes, v_outcomes) u;
END
$$;

-- Completes one task. Nothing is returned if it was not to be completed any more. With the number that its start gave, only while that
-- start is the last.
CREATE FUNCTION pgflow.complete_task(run_id uuid, step_slug text, task_index integer, output jsonb, start_number bigint DEFAULT NULL)
RETURNS SETOF pgflow.step_tasks
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path TO pg_catalog, pg_temp SET plan_cache_mode TO force_generic_plan SET enable_seqscan TO off SET jit TO off
AS $$
DECLARE
    v_outcome text;
BEGIN
    PERFORM pgflow._require_payload(format('the output of the step %L', complete_task.step_slug), complete_task.output);
    SELECT c.outcome INTO v_outcome FROM pgflow.complete_tasks(ARRAY[complete_task.run_id], ARRAY[complete_task.step_slug],
        ARRAY[complete_task.task_index], ARRAY[complete_task.output], ARRAY[complete_task.start_number]) c;
    IF v_outcome = 'run_too_large' THEN
        RAISE EXCEPTION 'with the output of the step %, all outputs of the run % would be over the limit of % bytes',
            quote_literal(complete_task.step_slug), complete_task.run_id, (SELECT max_run_output_bytes FROM pgflow.limits) USING ERRCODE = 'PF003';
    END IF;
    RETURN QUERY SELECT * FROM pgflow.step_tasks t
        WHERE t.run_id = complete_task.run_id AND t.step_slug = complete_task.step_slug AND t.task_index = complete_task.task_index
          AND v_outcome <> 'ignored';
END
$$;

-- Puts tasks that are started back into their queues. Their runs are locked.
CREATE FUNCTION pgflow._requeue(p_queue text, p_run_ids uuid[], p_step_slugs text[], p_task_indexes integer[], p_delays integer[],
    p_errors text[], p_uncounted boolean) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_lost record;
    v_known bigint[];
BEGIN
    PERFORM pgflow._revive_queue(p_queue);
    EXECUTE format($q$
        WITH shown AS (
            UPDATE pgmq.%I q SET vt = clock_timestamp() + make_interval(secs => u.delay)
            FROM unnest($1, $2, $3, $4) u(run_id, step_slug, task_index, delay)
            JOIN pgflow.step_tasks t ON t.run_id = u.run_id AND t.step_slug = u.step_slug AND t.task_index = u.task_index
            WHERE q.msg_id = t.message_id
            RETURNING q.msg_id)
        SELECT array_agg(s.msg_id) FROM shown s$q$, 'q_' || p_queue)
        INTO v_known USING p_run_ids, p_step_slugs, p_task_indexes, p_delays;
    UPDATE pgflow.step_tasks t
    SET status = 'queued', started_at = NULL, extended_until = NULL, error_message = coalesce(u.error, t.error_message),
        attempts_count = t.attempts_count - p_uncounted::integer
    FROM unnest(p_run_ids, p_step_slugs, p_task_indexes, p_errors) u(run_id, step_slug, task_index, error)
    WHERE t.run_id = u.run_id AND t.step_slug = u.step_slug AND t.task_index = u.task_index;
    -- A message that is not there any more, because somebody dropped the queue and made it again.
    PERFORM pgflow._send_again(p_queue, array_agg(u.run_id), array_agg(u.step_slug), array_agg(u.task_index), array_agg(u.delay))
    FROM unnest(p_run_ids, p_step_slugs, p_task_indexes, p_delays) u(run_id, step_slug, task_index, delay)
    JOIN pgflow.step_tasks t ON t.run_id = u.run_id AND t.step_slug = u.step_slug AND t.task_index = u.task_index
    WHERE t.message_id IS NULL OR t.message_id <> ALL (coalesce(v_known, '{}'))
    HAVING count(*) > 0;
    IF 0 = ANY (p_delays) THEN
        PERFORM pg_notify('pgflow_queue', p_queue);
    END IF;
    -- The step may have been routed elsewhere while the task was started.
    PERFORM pgflow._reroute(p_run_ids, p_step_slugs, p_task_indexes);
END
$$;

-- A task has no attempts left: it fails, and what its step says about that happens. Returns failed or skipped.
CREATE FUNCTION pgflow._exhaust(p_run_id uuid, p_step_slug text, p_task_index integer, p_error text) RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_task pgflow.step_tasks;
    v_then text;
BEGIN
    SELECT * INTO v_task FROM pgflow.step_tasks t
    WHERE t.run_id = p_run_id AND t.step_slug = p_step_slug AND t.task_index = p_task_index;
    IF v_task.message_id IS NOT NULL THEN
        PERFORM pgflow._archive(v_task.queue, ARRAY[v_task.message_id]);
    END IF;
    UPDATE pgflow.step_tasks t
    SET status = 'failed', failed_at = greatest(clock_timestamp(), t.queued_at, t.started_at), error_message = p_error
    WHERE t.run_id = p_run_id AND t.step_slug = p_step_slug AND t.task_index = p_task_index AND t.status IN ('queued', 'started');
    SELECT p.when_exhausted INTO v_then FROM pgflow.steps p WHERE p.flow_slug = v_task.flow_slug AND p.step_slug = p_step_slug;
    IF v_then = 'fail' THEN
        PERFORM pgflow._end_run(p_run_id, 'failed', p_step_slug, p_error);
        RETURN 'failed';
    END IF;
    PERFORM pgflow._skip_step(p_run_id, p_step_slug, 'handler_failed', p_error, v_then = 'skip-cascade');
    RETURN 'skipped';
END
$$;

-- Fails many tasks, as one transaction. Those that have attempts left are tried again, after base_delay * 2^attempts seconds. A row for
-- each, in order: retried (in so many seconds), failed (and its run with it), skipped (its step), or ignored: with p_starts also what has
-- lost its task to a later start.
CREATE FUNCTION pgflow.fail_tasks(
    p_run_ids uuid[],
    p_step_slugs text[],
    p_task_indexes integer[],
    p_errors text[],
    p_permanent boolean[] DEFAULT NULL,
    p_starts bigint[] DEFAULT NULL
) RETURNS TABLE (run_id uuid, step_slug text, task_index integer, outcome text, retry_in integer)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path TO pg_catalog, pg_temp SET plan_cache_mode TO force_generic_plan SET enable_seqscan TO off SET jit TO off
AS $$
#variable_conflict use_column
DECLARE
    v_runs uuid[];
    v_queues text[];
    v_outcomes text[];
    v_delays integer[];
    v_place integer;
BEGIN
    PERFORM pgflow._require_equal_lengths('fail_tasks', cardinality(p_run_ids), cardinality(p_step_slugs), cardinality(p_task_indexes),
        cardinality(p_errors), coalesce(cardinality(p_permanent), cardinality(p_run_ids)), coalesce(cardinality(p_starts), cardinality(p_run_ids)));
    v_runs := ARRAY(SELECT r.run_id FROM pgflow.runs r WHERE r.run_id = ANY (p_run_ids) AND r.status = 'started' ORDER BY r.run_id FOR UPDATE);

    -- By hand is for good: there is nobody who would try again.
    SELECT array_agg(x.queue ORDER BY x.place), array_agg(x.delay ORDER BY x.place),
        array_agg(CASE WHEN x.task IS NULL OR x.again > 1 THEN 'ignored'
                       WHEN x.queue IS NULL OR x.permanent OR x.attempts_count >= x.max_attempts THEN 'failed'
                       ELSE 'retried' END ORDER BY x.place)
    INTO v_queues, v_delays, v_outcomes
    FROM (
        SELECT u.place, t.run_id AS task, t.queue, t.attempts_count, coalesce(u.permanent, false) AS permanent,
            t.max_attempts, pgflow.calculate_retry_delay(t.base_delay, t.attempts_count) AS delay,
            row_number() OVER (PARTITION BY u.run_id, u.step_slug, u.task_index ORDER BY u.place) AS again
        FROM unnest(p_run_ids, p_step_slugs, p_task_indexes, p_permanent, p_starts)
            WITH ORDINALITY u(run_id, step_slug, task_index, permanent, start_number, place)
        LEFT JOIN LATERAL (SELECT k.run_id, k.queue, k.status, k.attempts_count, k.start_number, r.status AS run_status,
                coalesce(p.opt_max_attempts, f.opt_max_attempts) AS max_attempts, coalesce(p.opt_base_delay, f.opt_base_delay) AS base_delay
            FROM pgflow.step_tasks k
            JOIN pgflow.steps p ON p.flow_slug = k.flow_slug AND p.step_slug = k.step_slug
            JOIN pgflow.flows f ON f.flow_slug = k.flow_slug
            JOIN pgflow.runs r ON r.run_id = k.run_id
            WHERE k.run_id = u.run_id AND k.step_slug = u.step_slug AND k.task_index = u.task_index OFFSET 0) t
          ON t.run_status = 'started' AND t.status = 'started' AND (u.start_number IS NULL OR u.start_number = t.start_number)) x;

    PERFORM pgflow._requeue(u.queue, array_agg(u.run_id), array_agg(u.step_slug), array_agg(u.task_index), array_agg(u.delay),
        array_agg(left(u.error, 10000)), false)
    FROM unnest(v_queues, p_run_ids, p_step_slugs, p_task_indexes, v_delays, p_errors, v_outcomes)
        u(queue, run_id, step_slug, task_index, delay, error, outcome)
    WHERE u.outcome = 'retried' GROUP BY u.queue;

    IF 'failed' = ANY (v_outcomes) THEN
        FOR v_place IN
            SELECT u.place FROM unnest(p_run_ids, p_step_slugs, v_outcomes) WITH ORDINALITY u(run_id, step_slug, outcome, place)
            WHERE u.outcome = 'failed' ORDER BY u.run_id, u.step_slug, u.place
        LOOP
            -- One of the same step or run may have ended it a moment ago; the task is among what was ended.
            v_outcomes[v_place] := pgflow._exhaust(p_run_ids[v_place], p_step_slugs[v_place], p_task_indexes[v_place],
                left(coalesce(p_errors[v_place], 'failed'), 10000));
        END LOOP;
        PERFORM pgflow._advance(v_runs);
    END IF;
    RETURN QUERY SELECT u.run_id, u.step_slug, u.task_index, u.outcome, CASE u.outcome WHEN 'retried' THEN u.delay END
        FROM unnest(p_run_ids, p_step_slugs, p_task_indexes, v_outcomes, v_delays) u(run_id, step_slug, task_index, outcome, delay);
END
$$;

CREATE FUNCTION pgflow.fail_task(run_id uuid, step_slug text, task_index integer, error_message text, start_number bigint DEFAULT NULL)
RETURNS SETOF pgflow.step_tasks
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path TO pg_catalog, pg_temp SET plan_cache_mode TO force_generic_plan SET enable_seqscan TO off SET jit TO off
AS $$
DECLARE
    v_outcome text;
BEGIN
    SELECT f.outcome INTO v_outcome FROM pgflow.fail_tasks(ARRAY[fail_task.run_id], ARRAY[fail_task.step_slug],
        ARRAY[fail_task.task_index], ARRAY[fail_task.error_message], NULL, ARRAY[fail_task.start_number]) f;
    RETURN QUERY SELECT * FROM pgflow.step_tasks t
        WHERE t.run_id = fail_task.run_id AND t.step_slug = fail_task.step_slug AND t.task_index = fail_task.task_index
          AND v_outcome <> 'ignored';
END
$$;

-- Hands back tasks that were started and not worked on: the attempt does not count. Others see them after the delay. Returns how many there were.
CREATE FUNCTION pgflow.release_tasks(p_run_ids uuid[], p_step_slugs text[], p_task_indexes integer[], p_starts bigint[] DEFAULT NULL,
    p_delay integer DEFAULT 0) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path TO pg_catalog, pg_temp SET plan_cache_mode TO force_generic_plan SET enable_seqscan TO off SET jit TO off
AS $$
DECLARE
    v_group record;
    v_count integer := 0;
BEGIN
    PERFORM pgflow._require_equal_lengths('release_tasks', cardinality(p_run_ids), cardinality(p_step_slugs), cardinality(p_task_indexes),
        coalesce(cardinality(p_starts), cardinality(p_run_ids)));
    IF p_delay IS NULL OR p_delay NOT BETWEEN 0 AND 86400 THEN
        RAISE EXCEPTION 'release_tasks takes a delay of 0 to 86400 seconds' USING ERRCODE = 'PF001';
    END IF;
    PERFORM 1 FROM pgflow.runs r WHERE r.run_id = ANY (p_run_ids) AND r.status = 'started' ORDER BY r.run_id FOR UPDATE;
    FOR v_group IN
        SELECT t.queue, array_agg(t.run_id) AS runs, array_agg(t.step_slug) AS steps, array_agg(t.task_index) AS indexes
        FROM (SELECT DISTINCT * FROM unnest(p_run_ids, p_step_slugs, p_task_indexes, p_starts) x(run_id, step_slug, task_index, start_number)) u
        JOIN pgflow.step_tasks t ON t.run_id = u.run_id AND t.step_slug = u.step_slug AND t.task_index = u.task_index
        WHERE t.status = 'started' AND (u.start_number IS NULL OR u.start_number = t.start_number) AND t.queue IS NOT NULL GROUP BY t.queue ORDER BY t.queue
    LOOP
        PERFORM pgflow._requeue(v_group.queue, v_group.runs, v_group.steps, v_group.indexes,
            array_fill(p_delay, ARRAY[cardinality(v_group.runs)]), array_fill(NULL::text, ARRAY[cardinality(v_group.runs)]), true);
        v_count := v_count + cardinality(v_group.runs);
    END LOOP;
    RETURN v_count;
END
$$;

-- Hands back what a worker has started and does not know of: the answer of a read was lost with its connection. Names the starts that it has
-- in hand; it must not be reading meanwhile. Returns how many there were.
CREATE FUNCTION pgflow.release_unknown_tasks(p_worker_id uuid, p_starts bigint[]) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path TO pg_catalog, pg_temp SET plan_cache_mode TO force_generic_plan SET enable_seqscan TO off SET jit TO off
AS $$
DECLARE
    v_unknown record;
BEGIN
    SELECT array_agg(t.run_id) AS runs, array_agg(t.step_slug) AS steps, array_agg(t.task_index) AS indexes, array_agg(t.start_number) AS starts
    INTO v_unknown FROM pgflow.step_tasks t
    WHERE t.last_worker_id = p_worker_id AND t.status = 'started' AND t.queue IS NOT NULL
      AND NOT EXISTS (SELECT FROM unnest(p_starts) u(start_number) WHERE u.start_number = t.start_number);
    IF v_unknown.runs IS NULL THEN
        RETURN 0;
    END IF;
    RETURN pgflow.release_tasks(v_unknown.runs, v_unknown.steps, v_unknown.indexes, v_unknown.starts);
END
$$;

-- More time for tasks that are slow: hidden, and not taken for stalled, for so many seconds from now. Returns those that are still started;
-- a task that is not among them is nobody's business any more.
CREATE FUNCTION pgflow.extend_tasks(p_run_ids uuid[], p_step_slugs text[], p_task_indexes integer[], p_seconds integer,
    p_starts bigint[] DEFAULT NULL)
RETURNS TABLE (run_id uuid, step_slug text, task_index integer, start_number bigint)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path TO pg_catalog, pg_temp SET plan_cache_mode TO force_generic_plan SET enable_seqscan TO off SET jit TO off
AS $$
#variable_conflict use_column
DECLARE
    v_group record;
BEGIN
    PERFORM pgflow._require_equal_lengths('extend_tasks', cardinality(p_run_ids), cardinality(p_step_slugs), cardinality(p_task_indexes),
        coalesce(cardinality(p_starts), cardinality(p_run_ids)));
    IF p_seconds IS NULL OR p_seconds NOT BETWEEN 1 AND 86400 THEN
        RAISE EXCEPTION 'extend_tasks takes 1 to 86400 seconds' USING ERRCODE = 'PF001';
    END IF;
    -- Messages that a starter has at this moment are left out: it looks, sees that the task is started, and lets go.
    FOR v_group IN
        SELECT t.queue, array_agg(t.message_id) AS ids
        FROM unnest(p_run_ids, p_step_slugs, p_task_indexes, p_starts) u(run_id, step_slug, task_index, start_number)
        JOIN pgflow.step_tasks t ON t.run_id = u.run_id AND t.step_slug = u.step_slug AND t.task_index = u.task_index
        WHERE t.status = 'started' AND (u.start_number IS NULL OR u.start_number = t.start_number) AND t.message_id IS NOT NULL
        GROUP BY t.queue ORDER BY t.queue
    LOOP
        IF pgflow._queue_exists(v_group.queue) THEN
            EXECUTE format($q$
                WITH mine AS (SELECT q.msg_id FROM pgmq.%1$I q WHERE q.msg_id = ANY ($1) FOR UPDATE SKIP LOCKED), hidden AS (
                    UPDATE pgmq.%1$I q SET vt = greatest(q.vt, clock_timestamp() + make_interval(secs => $2))
                    FROM mine WHERE q.msg_id = mine.msg_id RETURNING q.msg_id)
                UPDATE pgflow.step_tasks t SET extended_until = greatest(t.extended_until, clock_timestamp() + make_interval(secs => $2))
                FROM hidden WHERE t.queue = $3 AND t.message_id = hidden.msg_id AND t.status = 'started'$q$, 'q_' || v_group.queue)
                USING v_group.ids, p_seconds, v_group.queue;
        END IF;
    END LOOP;
    RETURN QUERY
    SELECT t.run_id, t.step_slug, t.task_index, t.start_number
    FROM unnest(p_run_ids, p_step_slugs, p_task_indexes, p_starts) u(run_id, step_slug, task_index, start_number)
    JOIN pgflow.step_tasks t ON t.run_id = u.run_id AND t.step_slug = u.step_slug AND t.task_index = u.task_index
    WHERE t.status = 'started' AND (u.start_number IS NULL OR u.start_number = t.start_number);
END
$$;

-- Requeues tasks that were found stalled; the third time is the last, then it counts as exhausted. They are looked at again under the
-- lock of their run: one that was completed meanwhile stays so.
CREATE FUNCTION pgflow._requeue_stalled(p_run_ids uuid[], p_step_slugs text[], p_task_indexes integer[], p_starts bigint[])
RETURNS integer
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_group record;
    v_task record;
    v_count integer := 0;
    v_ended boolean := false;
BEGIN
    PERFORM 1 FROM pgflow.runs r WHERE r.run_id = ANY (p_run_ids) AND r.status = 'started' ORDER BY r.run_id FOR UPDATE;
    FOR v_group IN
        SELECT t.queue, array_agg(t.run_id) AS runs, array_agg(t.step_slug) AS steps, array_agg(t.task_index) AS indexes
        FROM unnest(p_run_ids, p_step_slugs, p_task_indexes, p_starts) u(run_id, step_slug, task_index, start_number)
        JOIN pgflow.step_tasks t ON t.run_id = u.run_id AND t.step_slug = u.step_slug AND t.task_index = u.task_index
        WHERE t.status = 'started' AND t.start_number = u.start_number AND t.queue IS NOT NULL AND t.requeued_count < 3
        GROUP BY t.queue ORDER BY t.queue
    LOOP
        PERFORM pgflow._requeue(v_group.queue, v_group.runs, v_group.steps, v_group.indexes,
            array_fill(0, ARRAY[cardinality(v_group.runs)]), array_fill(NULL::text, ARRAY[cardinality(v_group.runs)]), false);
        UPDATE pgflow.step_tasks t SET requeued_count = t.requeued_count + 1, last_requeued_at = clock_timestamp()
        FROM unnest(v_group.runs, v_group.steps, v_group.indexes) u(run_id, step_slug, task_index)
        WHERE t.run_id = u.run_id AND t.step_slug = u.step_slug AND t.task_index = u.task_index;
        v_count := v_count + cardinality(v_group.runs);
    END LOOP;
    FOR v_task IN
        SELECT t.run_id, t.step_slug, t.task_index
        FROM unnest(p_run_ids, p_step_slugs, p_task_indexes, p_starts) u(run_id, step_slug, task_index, start_number)
        JOIN pgflow.step_tasks t ON t.run_id = u.run_id AND t.step_slug = u.step_slug AND t.task_index = u.task_index
        WHERE t.status = 'started' AND t.start_number = u.start_number AND t.queue IS NOT NULL AND t.requeued_count >= 3
        ORDER BY t.run_id, t.step_slug, t.task_index
    LOOP
        v_ended := true;
        PERFORM pgflow._exhaust(v_task.run_id, v_task.step_slug, v_task.task_index, 'stalled: its worker went away, three times again');
        UPDATE pgflow.step_tasks t SET permanently_stalled_at = clock_timestamp()
        WHERE t.run_id = v_task.run_id AND t.step_slug = v_task.step_slug AND t.task_index = v_task.task_index;
    END LOOP;
    IF v_ended THEN
        PERFORM pgflow._advance(ARRAY(SELECT DISTINCT u FROM unnest(p_run_ids) u));
    END IF;
    RETURN v_count;
END
$$;

-- Tasks that were started longer ago than their timeout and half a minute, and whose worker has not asked for more time. At most a thousand
-- in a call. Tasks by hand have all the time in the world. Queues that were dropped are repaired on the way.
CREATE FUNCTION pgflow.requeue_stalled_tasks() RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp SET jit TO off
AS $$
DECLARE
    v_found record;
    v_waiting uuid[];
BEGIN
    -- One thing at a time, since each takes locks of runs in their order: the rest is for the next call.
    IF pgflow.repair_queues(ARRAY(SELECT q.queue FROM pgflow.queues q)) > 0 THEN
        RETURN 0;
    END IF;
    -- A run that waits for nobody: it was in another transaction's hands, which was rolled back, when its turn came.
    v_waiting := ARRAY(
        SELECT DISTINCT ON (w.flow_slug, w.key) w.run_id FROM pgflow.runs w
        WHERE w.status = 'waiting' AND w.key IS NOT NULL AND NOT EXISTS (SELECT FROM pgflow.runs o
            WHERE o.flow_slug = w.flow_slug AND o.key = w.key AND o.key IS NOT NULL AND o.status = 'started'));
    IF cardinality(v_waiting) > 0 THEN
        PERFORM pgflow._advance(pgflow._next_of_key(v_waiting));
        RETURN 0;
    END IF;
    SELECT array_agg(x.run_id) AS runs, array_agg(x.step_slug) AS steps, array_agg(x.task_index) AS indexes, array_agg(x.start_number) AS starts
    INTO v_found FROM (
        SELECT t.run_id, t.step_slug, t.task_index, t.start_number
        FROM pgflow.step_tasks t
        JOIN pgflow.steps p ON p.flow_slug = t.flow_slug AND p.step_slug = t.step_slug
        JOIN pgflow.flows f ON f.flow_slug = t.flow_slug
        WHERE t.status = 'started' AND t.queue IS NOT NULL
          AND t.started_at < clock_timestamp() - make_interval(secs => coalesce(p.opt_timeout, f.opt_timeout) + 30)
          AND coalesce(t.extended_until < clock_timestamp() - interval '30 seconds', true)
        ORDER BY t.started_at LIMIT 1000) x;
    IF v_found.runs IS NULL THEN
        RETURN 0;
    END IF;
    RETURN pgflow._requeue_stalled(v_found.runs, v_found.steps, v_found.indexes, v_found.starts);
END
$$;

-- Tasks of workers that have not been heard of for so long, whatever their timeouts: such a worker is marked as stopped, and finds that it came
-- too late for them if it comes back. While the server was away nobody could be heard: silence counts from its start at the earliest.
CREATE FUNCTION pgflow.requeue_tasks_of_dead_workers(dead_after interval DEFAULT '30 seconds') RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp SET jit TO off
AS $$
DECLARE
    v_found record;
BEGIN
    IF dead_after IS NULL OR dead_after < interval '1 second' THEN
        RAISE EXCEPTION 'a worker is not dead before a second has passed' USING ERRCODE = 'PF001';
    END IF;
    UPDATE pgflow.workers w SET stopped_at = clock_timestamp()
    WHERE w.stopped_at IS NULL AND greatest(w.last_heartbeat_at, pg_postmaster_start_time()) < clock_timestamp() - dead_after;
    SELECT array_agg(x.run_id) AS runs, array_agg(x.step_slug) AS steps, array_agg(x.task_index) AS indexes, array_agg(x.start_number) AS starts
    INTO v_found FROM (
        SELECT t.run_id, t.step_slug, t.task_index, t.start_number
        FROM pgflow.step_tasks t JOIN pgflow.workers w ON w.worker_id = t.last_worker_id
        WHERE t.status = 'started' AND t.queue IS NOT NULL AND w.stopped_at IS NOT NULL
        ORDER BY t.started_at LIMIT 1000) x;
    IF v_found.runs IS NULL THEN
        RETURN 0;
    END IF;
    RETURN pgflow._requeue_stalled(v_found.runs, v_found.steps, v_found.indexes, v_found.starts);
END
$$;

-- Makes a queue if it is not there, and sends the messages of its tasks that are not in it. Tasks that are started keep going; should they
-- have to be tried again, they get a message then. Returns how many were sent.
CREATE FUNCTION pgflow._repair_queue(p_queue text) RETURNS integer
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_tasks record;
    v_count integer := 0;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('pgflow.repair:' || p_queue, 0));
    PERFORM 1 FROM pgflow.runs r
    WHERE r.run_id IN (SELECT t.run_id FROM pgflow.step_tasks t WHERE t.queue = p_queue AND t.status IN ('queued', 'started'))
    ORDER BY r.run_id FOR UPDATE;
    PERFORM pgflow._create_queue(p_queue);
    PERFORM pgflow._renumber(p_queue);
    EXECUTE format($q$
        SELECT array_agg(t.run_id) AS runs, array_agg(t.step_slug) AS steps, array_agg(t.task_index) AS indexes, array_agg(0) AS delays
        FROM pgflow.step_tasks t JOIN pgflow.runs r ON r.run_id = t.run_id AND r.status = 'started'
        WHERE t.queue = $1 AND t.status = 'queued' AND NOT EXISTS (SELECT FROM pgmq.%I q WHERE q.msg_id = t.message_id)$q$, 'q_' || p_queue)
        INTO v_tasks USING p_queue;
    IF v_tasks.runs IS NOT NULL THEN
        v_count := pgflow._send_again(p_queue, v_tasks.runs, v_tasks.steps, v_tasks.indexes, v_tasks.delays);
    END IF;
    INSERT INTO pgflow.queues AS q (queue, relation) VALUES (p_queue, to_regclass(format('pgmq.%I', 'q_' || p_queue)))
    ON CONFLICT (queue) DO UPDATE SET relation = excluded.relation;
    RETURN v_count;
END
$$;

-- Makes queues of flows again that were dropped, or dropped and made again by hand, and sends the messages of their tasks. Returns how many
-- were sent.
CREATE FUNCTION pgflow.repair_queues(p_queues text[]) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_count integer := 0;
    v_queues text[] := ARRAY(
        SELECT q.queue FROM pgflow.queues q
        WHERE q.queue IN (SELECT pgflow._queue_name(p) FROM unnest(p_queues) p)
          AND (NOT pgflow._queue_exists(q.queue) OR q.relation IS DISTINCT FROM to_regclass(format('pgmq.%I', 'q_' || q.queue)))
        ORDER BY q.queue);
    v_queue text;
BEGIN
    PERFORM 1 FROM pgflow.runs r
    WHERE r.run_id IN (SELECT t.run_id FROM pgflow.step_tasks t WHERE t.queue = ANY (v_queues) AND t.status IN ('queued', 'started'))
    ORDER BY r.run_id FOR UPDATE;
    FOREACH v_queue IN ARRAY v_queues LOOP
        v_count := v_count + pgflow._repair_queue(v_queue);
    END LOOP;
    RETURN v_count;
END
$$;

-- The original's name, for one task.
CREATE FUNCTION pgflow._archive_task_message(p_run_id uuid, p_step_slug text, p_task_index integer) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
    SELECT pgflow._archive(t.queue, ARRAY[t.message_id]) FROM pgflow.step_tasks t
    WHERE t.run_id = p_run_id AND t.step_slug = p_step_slug AND t.task_index = p_task_index AND t.message_id IS NOT NULL
$$;

-- Workers.

CREATE FUNCTION pgflow.start_worker(worker_id uuid, function_name text, queues text[]) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    IF coalesce(cardinality(start_worker.queues), 0) = 0 OR length(start_worker.function_name) NOT BETWEEN 1 AND 200 THEN
        RAISE EXCEPTION 'a worker has a name of 1 to 200 characters and a queue at least' USING ERRCODE = 'PF001';
    END IF;
    INSERT INTO pgflow.workers AS w (worker_id, queue_name, function_name, queues)
    SELECT start_worker.worker_id, q[1], start_worker.function_name, q
    FROM (SELECT ARRAY(SELECT pgflow._queue_name(x) FROM unnest(start_worker.queues) x) AS q) named
    ON CONFLICT (worker_id) DO UPDATE
    SET queue_name = excluded.queue_name, queues = excluded.queues, function_name = excluded.function_name,
        last_heartbeat_at = clock_timestamp(), stopped_at = NULL;
END
$$;

-- False: the worker is asked to stop. NULL: it is not known (any more), and has to start again. One that was taken for dead and is not goes on:
-- its tasks were given to others, and that is all that it has lost.
CREATE FUNCTION pgflow.heartbeat(worker_id uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_go_on boolean;
BEGIN
    UPDATE pgflow.workers w
    SET last_heartbeat_at = clock_timestamp(), stopped_at = CASE WHEN w.deprecated_at IS NOT NULL THEN w.stopped_at END
    WHERE w.worker_id = heartbeat.worker_id
    RETURNING w.deprecated_at IS NULL INTO v_go_on;
    RETURN v_go_on;
END
$$;

CREATE FUNCTION pgflow.mark_worker_stopped(worker_id uuid) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
    UPDATE pgflow.workers w SET stopped_at = clock_timestamp() WHERE w.worker_id = mark_worker_stopped.worker_id AND w.stopped_at IS NULL
$$;

CREATE FUNCTION pgflow.track_worker_function(function_name text) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
    INSERT INTO pgflow.worker_functions AS w (function_name) VALUES ($1)
    ON CONFLICT (function_name) DO UPDATE SET updated_at = clock_timestamp()
$$;

-- Where the extension pg_cron is there, it can do what the workers do: look for stalled tasks.
CREATE FUNCTION pgflow.setup_requeue_stalled_tasks_cron(cron_interval text DEFAULT '15 seconds') RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_extension WHERE extname = 'pg_cron') THEN
        RETURN 'pg_cron is not there; workers look for stalled tasks themselves';
    END IF;
    EXECUTE 'SELECT cron.schedule(''pgflow_requeue_stalled_tasks'', $1, ''SELECT pgflow.requeue_stalled_tasks()'')' USING cron_interval;
    RETURN 'scheduled every ' || cron_interval;
END
$$;
