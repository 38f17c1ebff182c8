-- What follows from what: from a step that has finished to the steps that waited for it, to the end of the run, to the next run of its key.
--
-- Everything here works on many runs at once, in a few statements, whatever their number. Who calls it holds the locks of the runs.
--
-- Locks are taken in this order, so that nobody waits in a circle:
--   1. runs, by run_id   2. messages   3. tasks   4. the keys of runs
-- The next run of a key is taken last, and only if nobody has it: it waits, so that nobody but a canceller would.
-- Who starts tasks takes no run's lock: it takes messages that nobody else has (SKIP LOCKED), then their tasks. Whoever changes a task
-- that has a message has the message first; therefore a starter never waits for a task.

-- Tells who listens. `pgflow_event` for all that happens to runs and steps; a schema `realtime`, where there is one, gets it too.
CREATE FUNCTION pgflow._tell(p_events jsonb[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pg_notify('pgflow_event', e::text) FROM unnest(p_events) e;
    -- Only one that the server's owner or ours has made: it runs with our rights.
    IF EXISTS (SELECT FROM pg_proc p JOIN pg_roles o ON o.oid = p.proowner
               WHERE p.oid = to_regprocedure('realtime.send(jsonb,text,text,boolean)') AND (o.rolsuper OR o.rolname = current_user)) THEN
        EXECUTE 'SELECT realtime.send(e, e ->> ''event_type'', ''pgflow:run:'' || (e ->> ''run_id''), false) FROM unnest($1) e'
            USING p_events;
    END IF;
END
$$;

-- Puts messages away. A queue that was dropped has none.
CREATE FUNCTION pgflow._archive(p_queue text, p_message_ids bigint[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    IF p_queue IS NOT NULL AND cardinality(p_message_ids) > 0 AND pgflow._queue_exists(p_queue) THEN
        PERFORM pgmq.archive(p_queue, p_message_ids);
    END IF;
END
$$;

-- Ends the tasks of a run, or of one of its steps, that are alive. Their workers will find that they came too late.
CREATE FUNCTION pgflow._abort_tasks(p_run_id uuid, p_step_slug text, p_error text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgflow._archive(x.queue, x.ids) FROM (
        SELECT t.queue, array_agg(t.message_id) AS ids
        FROM pgflow.step_tasks t
        WHERE t.run_id = p_run_id AND (p_step_slug IS NULL OR t.step_slug = p_step_slug)
          AND t.status IN ('queued', 'started') AND t.message_id IS NOT NULL
        GROUP BY t.queue ORDER BY t.queue) x;
    UPDATE pgflow.step_tasks t
    SET status = 'failed', failed_at = greatest(clock_timestamp(), t.queued_at, t.started_at), error_message = p_error
    WHERE t.run_id = p_run_id AND (p_step_slug IS NULL OR t.step_slug = p_step_slug) AND t.status IN ('queued', 'started');
END
$$;

-- The steps that wait for these, which have just been completed or skipped, wait for fewer now; a map learns its width; the runs have
-- fewer steps before them. What was skipped is an empty array to a map.
CREATE FUNCTION pgflow._release(p_run_ids uuid[], p_step_slugs text[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE pgflow.step_states c
    SET remaining_deps = c.remaining_deps - x.finished, initial_tasks = coalesce(x.width, c.initial_tasks)
    FROM (
        SELECT u.run_id, d.step_slug, count(*)::integer AS finished,
            max(CASE WHEN cs.step_type <> 'map' THEN NULL
                     WHEN jsonb_typeof(s.output) = 'array' THEN jsonb_array_length(s.output) ELSE 0 END) AS width
        FROM unnest(p_run_ids, p_step_slugs) u(run_id, step_slug)
        JOIN pgflow.step_states s ON s.run_id = u.run_id AND s.step_slug = u.step_slug
        JOIN pgflow.deps d ON d.flow_slug = s.flow_slug AND d.dep_slug = s.step_slug
        JOIN pgflow.steps cs ON cs.flow_slug = d.flow_slug AND cs.step_slug = d.step_slug
        GROUP BY u.run_id, d.step_slug) x
    WHERE c.run_id = x.run_id AND c.step_slug = x.step_slug AND c.status = 'created';
    UPDATE pgflow.runs r SET remaining_steps = r.remaining_steps - x.finished
    FROM (SELECT u.run_id, count(*)::integer AS finished FROM unnest(p_run_ids) u(run_id) GROUP BY u.run_id) x
    WHERE r.run_id = x.run_id;
END
$$;

-- Skips a step that has not finished. With `p_cascade` all that depends on it goes with it; else they go on without it.
CREATE FUNCTION pgflow._skip_step(p_run_id uuid, p_step_slug text, p_reason text, p_error text, p_cascade boolean) RETURNS integer
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_steps text[];
    v_events jsonb[];
BEGIN
    PERFORM pgflow._abort_tasks(p_run_id, p_step_slug, coalesce(p_error, p_reason));
    WITH RECURSIVE reached AS (
        SELECT s.flow_slug, s.step_slug, p_reason AS reason, p_error AS error
        FROM pgflow.step_states s WHERE s.run_id = p_run_id AND s.step_slug = p_step_slug
        UNION
        SELECT d.flow_slug, d.step_slug, 'dependency_skipped', NULL
        FROM reached JOIN pgflow.deps d ON d.flow_slug = reached.flow_slug AND d.dep_slug = reached.step_slug
        WHERE p_cascade
    ), skipped AS (
        UPDATE pgflow.step_states s
        SET status = 'skipped', skip_reason = reached.reason, error_message = reached.error, remaining_tasks = NULL,
            skipped_at = greatest(clock_timestamp(), s.created_at)
        FROM reached
        WHERE s.run_id = p_run_id AND s.step_slug = reached.step_slug AND s.status IN ('created', 'started')
        RETURNING s.flow_slug, s.step_slug, s.skip_reason
    )
    SELECT array_agg(x.step_slug), array_agg(jsonb_build_object('event_type', 'step:skipped', 'run_id', p_run_id, 'flow_slug', x.flow_slug,
        'step_slug', x.step_slug, 'status', 'skipped', 'skip_reason', x.skip_reason))
    INTO v_steps, v_events FROM skipped x;
    IF v_steps IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM pgflow._release(array_fill(p_run_id, ARRAY[cardinality(v_steps)]), v_steps);
    PERFORM pgflow._tell(v_events);
    RETURN cardinality(v_steps);
END
$$;

-- The original's name for skipping a step together with what depends on it.
CREATE FUNCTION pgflow._cascade_force_skip_steps(run_id uuid, step_slug text, skip_reason text) RETURNS integer
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
    SELECT pgflow._skip_step($1, $2, $3, NULL, true)
$$;

-- Ends a run that is not finished, as failed or cancelled. Its steps that were not finished are skipped with the reason, except the one
-- that is to blame; nothing of it stays queued or started.
CREATE FUNCTION pgflow._end_run(p_run_id uuid, p_status text, p_step_slug text, p_error text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_run pgflow.runs;
    v_events jsonb[];
BEGIN
    UPDATE pgflow.runs r
    SET status = p_status,
        error_message = p_error,
        failed_at = CASE p_status WHEN 'failed' THEN greatest(clock_timestamp(), r.started_at) END,
        cancelled_at = CASE p_status WHEN 'cancelled' THEN clock_timestamp() END
    WHERE r.run_id = p_run_id AND r.status IN ('started', 'waiting')
    RETURNING * INTO v_run;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM pgflow._abort_tasks(p_run_id, NULL, CASE p_status WHEN 'failed' THEN 'the run failed: ' ELSE 'the run was cancelled: ' END || p_error);
    WITH ended AS (
        UPDATE pgflow.step_states s
        SET status = CASE WHEN s.step_slug = p_step_slug THEN 'failed' ELSE 'skipped' END,
            failed_at = CASE WHEN s.step_slug = p_step_slug THEN greatest(clock_timestamp(), s.created_at, s.started_at) END,
            error_message = CASE WHEN s.step_slug = p_step_slug THEN p_error END,
            skip_reason = CASE WHEN s.step_slug IS DISTINCT FROM p_step_slug THEN 'run_' || p_status END,
            skipped_at = CASE WHEN s.step_slug IS DISTINCT FROM p_step_slug THEN greatest(clock_timestamp(), s.created_at) END
        WHERE s.run_id = p_run_id AND s.status IN ('created', 'started')
        RETURNING s.step_slug, s.status, s.error_message, s.skip_reason
    )
    SELECT array_agg(jsonb_build_object('event_type', 'step:' || e.status, 'run_id', p_run_id, 'flow_slug', v_run.flow_slug,
        'step_slug', e.step_slug, 'status', e.status, 'error_message', left(e.error_message, 1000), 'skip_reason', e.skip_reason))
    INTO v_events FROM ended e;
    PERFORM pgflow._tell(v_events || jsonb_build_object('event_type', 'run:' || p_status, 'run_id', p_run_id,
        'flow_slug', v_run.flow_slug, 'status', p_status, 'error_message', left(p_error, 1000)));
END
$$;

-- Steps that could start, but whose conditions do not hold, are skipped, or fail their run. Returns how many were decided so.
CREATE FUNCTION pgflow._resolve_conditions(p_run_ids uuid[]) RETURNS integer
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_unmet record;
    v_count integer := 0;
BEGIN
    FOR v_unmet IN
        SELECT s.run_id, s.step_slug, p.when_unmet
        FROM pgflow.step_states s
        JOIN pgflow.steps p ON p.flow_slug = s.flow_slug AND p.step_slug = s.step_slug
        JOIN pgflow.runs r ON r.run_id = s.run_id AND r.status = 'started'
        CROSS JOIN LATERAL (
            SELECT CASE p.deps_count WHEN 0 THEN r.input ELSE (
                SELECT coalesce(jsonb_object_agg(d.dep_slug, ds.output), '{}')
                FROM pgflow.deps d JOIN pgflow.step_states ds ON ds.run_id = s.run_id AND ds.step_slug = d.dep_slug
                WHERE d.flow_slug = s.flow_slug AND d.step_slug = s.step_slug AND ds.status = 'completed') END AS value) seen
        WHERE s.run_id = ANY (p_run_ids) AND s.status = 'created' AND s.remaining_deps = 0
          AND (p.required_input_pattern IS NOT NULL OR p.forbidden_input_pattern IS NOT NULL)
          AND NOT (coalesce(seen.value @> p.required_input_pattern, true) AND NOT coalesce(seen.value @> p.forbidden_input_pattern, false))
        ORDER BY s.run_id, p.step_index
    LOOP
        v_count := v_count + 1;
        IF v_unmet.when_unmet = 'fail' THEN
            PERFORM pgflow._end_run(v_unmet.run_id, 'failed', v_unmet.step_slug,
                format('the condition of the step %L does not hold', v_unmet.step_slug));
        ELSE
            PERFORM pgflow._skip_step(v_unmet.run_id, v_unmet.step_slug, 'condition_unmet', NULL, v_unmet.when_unmet = 'skip-cascade');
        END IF;
    END LOOP;
    RETURN v_count;
END
$$;

-- Maps over nothing are completed with nothing. Returns how many.
CREATE FUNCTION pgflow._complete_taskless(p_run_ids uuid[]) RETURNS integer
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_runs uuid[];
    v_steps text[];
    v_events jsonb[];
BEGIN
    WITH done AS (
        UPDATE pgflow.step_states s
        SET status = 'completed', started_at = greatest(clock_timestamp(), s.created_at), remaining_tasks = 0, output = '[]',
            completed_at = greatest(clock_timestamp(), s.created_at) + interval '1 microsecond'
        FROM pgflow.runs r
        WHERE s.run_id = ANY (p_run_ids) AND s.status = 'created' AND s.remaining_deps = 0 AND s.initial_tasks = 0
          AND r.run_id = s.run_id AND r.status = 'started'
        RETURNING s.run_id, s.step_slug, s.flow_slug
    )
    SELECT array_agg(d.run_id), array_agg(d.step_slug), array_agg(jsonb_build_object('event_type', 'step:completed', 'run_id', d.run_id,
        'flow_slug', d.flow_slug, 'step_slug', d.step_slug, 'status', 'completed'))
    INTO v_runs, v_steps, v_events FROM done d;
    IF v_runs IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM pgflow._release(v_runs, v_steps);
    PERFORM pgflow._tell(v_events);
    RETURN cardinality(v_runs);
END
$$;

-- The tasks of steps that have just started, with their messages in one queue. What a message says is what it is found by, so that its
-- id goes to the right task whatever the order of the rows.
CREATE FUNCTION pgflow._send_tasks(p_queue text, p_run_ids uuid[], p_step_slugs text[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_wanted CONSTANT text := $q$
        chosen AS (
            SELECT s.flow_slug, s.run_id, s.step_slug, p.step_type, p.deps_count, coalesce(p.opt_start_delay, 0) AS delay
            FROM unnest($1, $2) u(run_id, step_slug)
            JOIN pgflow.step_states s ON s.run_id = u.run_id AND s.step_slug = u.step_slug
            JOIN pgflow.steps p ON p.flow_slug = s.flow_slug AND p.step_slug = s.step_slug
        ), wanted AS (
            SELECT c.flow_slug, c.run_id, c.step_slug, c.delay, 0 AS task_index, NULL::jsonb AS element
            FROM chosen c WHERE c.step_type = 'single'
            UNION ALL
            SELECT c.flow_slug, c.run_id, c.step_slug, c.delay, (e.place - 1)::integer, e.value
            FROM chosen c
            CROSS JOIN LATERAL jsonb_array_elements(CASE c.deps_count
                WHEN 0 THEN (SELECT r.input FROM pgflow.runs r WHERE r.run_id = c.run_id)
                ELSE (SELECT ds.output FROM pgflow.deps d JOIN pgflow.step_states ds ON ds.run_id = c.run_id AND ds.step_slug = d.dep_slug
                      WHERE d.flow_slug = c.flow_slug AND d.step_slug = c.step_slug)
                END) WITH ORDINALITY e(value, place)
            WHERE c.step_type = 'map'
        )$q$;
BEGIN
    IF p_queue IS NULL THEN
        -- Completed by hand: it is in somebody's hands from the beginning, and there is no message.
        EXECUTE 'WITH ' || v_wanted || $q$
            INSERT INTO pgflow.step_tasks (flow_slug, run_id, step_slug, task_index, status, attempts_count, queued_at, started_at, element, start_number)
            SELECT w.flow_slug, w.run_id, w.step_slug, w.task_index, 'started', 1, now.at, now.at, w.element, nextval('pgflow.start_numbers')
            FROM wanted w CROSS JOIN (SELECT clock_timestamp() AS at) now$q$
            USING p_run_ids, p_step_slugs;
        RETURN;
    END IF;
    PERFORM pgflow._revive_queue(p_queue);
    FOR v_try IN 1 .. 2 LOOP
        BEGIN
            EXECUTE 'WITH ' || v_wanted || format($q$, sent AS (
                    INSERT INTO pgmq.%I (vt, message)
                    SELECT clock_timestamp() + make_interval(secs => w.delay),
                        jsonb_build_object('flow_slug', w.flow_slug, 'run_id', w.run_id, 'step_slug', w.step_slug, 'task_index', w.task_index)
                    FROM wanted w
                    RETURNING msg_id, (message ->> 'run_id')::uuid AS run_id, message ->> 'step_slug' AS step_slug,
                        (message ->> 'task_index')::integer AS task_index
                )
                INSERT INTO pgflow.step_tasks (flow_slug, run_id, step_slug, task_index, queue, message_id, status, queued_at, element)
                SELECT w.flow_slug, w.run_id, w.step_slug, w.task_index, $3, s.msg_id, 'queued', clock_timestamp(), w.element
                FROM wanted w JOIN sent s ON s.run_id = w.run_id AND s.step_slug = w.step_slug AND s.task_index = w.task_index$q$, 'q_' || p_queue)
                USING p_run_ids, p_step_slugs, p_queue;
            EXIT;
        EXCEPTION WHEN unique_violation THEN
            -- Somebody has dropped the queue and made it again behind our back.
            IF v_try = 2 THEN
                RAISE;
            END IF;
            PERFORM pgflow._renumber(p_queue);
        END;
    END LOOP;
    PERFORM pg_notify('pgflow_queue', p_queue);
END
$$;

-- Starts every step of these runs that waits for nothing any more.
CREATE FUNCTION pgflow._start_ready(p_run_ids uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_runs uuid[];
    v_steps text[];
    v_queues text[];
    v_events jsonb[];
    v_group record;
BEGIN
    WITH ready AS (
        UPDATE pgflow.step_states s
        SET status = 'started', started_at = greatest(clock_timestamp(), s.created_at), remaining_tasks = s.initial_tasks
        FROM pgflow.runs r
        WHERE s.run_id = ANY (p_run_ids) AND s.status = 'created' AND s.remaining_deps = 0 AND s.initial_tasks > 0
          AND r.run_id = s.run_id AND r.status = 'started'
        RETURNING s.run_id, s.step_slug, s.flow_slug
    )
    SELECT array_agg(x.run_id), array_agg(x.step_slug), array_agg(coalesce(p.queue, f.queue, lower(f.flow_slug))),
        array_agg(jsonb_build_object('event_type', 'step:started', 'run_id', x.run_id, 'flow_slug', x.flow_slug,
            'step_slug', x.step_slug, 'status', 'started'))
    INTO v_runs, v_steps, v_queues, v_events
    FROM ready x
    JOIN pgflow.steps p ON p.flow_slug = x.flow_slug AND p.step_slug = x.step_slug
    JOIN pgflow.flows f ON f.flow_slug = x.flow_slug;
    IF v_runs IS NULL THEN
        RETURN;
    END IF;
    FOR v_group IN
        SELECT nullif(u.queue, 'false') AS queue, array_agg(u.run_id) AS runs, array_agg(u.step_slug) AS steps
        FROM unnest(v_runs, v_steps, v_queues) u(run_id, step_slug, queue) GROUP BY u.queue ORDER BY u.queue
    LOOP
        PERFORM pgflow._send_tasks(v_group.queue, v_group.runs, v_group.steps);
    END LOOP;
    PERFORM pgflow._tell(v_events);
END
$$;

-- Runs that have no step before them are completed. Their output is that of the steps that nothing of the run depends on.
CREATE FUNCTION pgflow._complete_runs(p_run_ids uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_events jsonb[];
BEGIN
    WITH done AS (
        UPDATE pgflow.runs r
        SET status = 'completed', completed_at = greatest(clock_timestamp(), r.started_at), output = (
            SELECT coalesce(jsonb_object_agg(s.step_slug, s.output), '{}')
            FROM pgflow.step_states s
            WHERE s.run_id = r.run_id AND s.status = 'completed'
              AND NOT EXISTS (SELECT FROM pgflow.deps d JOIN pgflow.step_states c ON c.run_id = s.run_id AND c.step_slug = d.step_slug
                  WHERE d.flow_slug = s.flow_slug AND d.dep_slug = s.step_slug))
        WHERE r.run_id = ANY (p_run_ids) AND r.status = 'started' AND r.remaining_steps = 0
        RETURNING r.run_id, r.flow_slug
    )
    SELECT array_agg(jsonb_build_object('event_type', 'run:completed', 'run_id', d.run_id, 'flow_slug', d.flow_slug, 'status', 'completed'))
    INTO v_events FROM done d;
    IF v_events IS NOT NULL THEN
        PERFORM pgflow._tell(v_events);
    END IF;
END
$$;

-- Tasks that are queued and have no message get one: those of a run that goes on after it failed, or of a queue that was dropped.
CREATE FUNCTION pgflow._send_again(p_queue text, p_run_ids uuid[], p_step_slugs text[], p_task_indexes integer[], p_delays integer[])
RETURNS integer
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_count integer;
BEGIN
    PERFORM pgflow._revive_queue(p_queue);
    FOR v_try IN 1 .. 2 LOOP
        BEGIN
            EXECUTE format($q$
                WITH wanted AS (
                    SELECT t.flow_slug, t.run_id, t.step_slug, t.task_index, u.delay
                    FROM unnest($1, $2, $3, $4) u(run_id, step_slug, task_index, delay)
                    JOIN pgflow.step_tasks t ON t.run_id = u.run_id AND t.step_slug = u.step_slug AND t.task_index = u.task_index
                ), sent AS (
                    INSERT INTO pgmq.%I (vt, message)
                    SELECT clock_timestamp() + make_interval(secs => coalesce(w.delay, 0)),
                        jsonb_build_object('flow_slug', w.flow_slug, 'run_id', w.run_id, 'step_slug', w.step_slug, 'task_index', w.task_index)
                    FROM wanted w
                    RETURNING msg_id, (message ->> 'run_id')::uuid AS run_id, message ->> 'step_slug' AS step_slug,
                        (message ->> 'task_index')::integer AS task_index
                )
                UPDATE pgflow.step_tasks t SET message_id = s.msg_id, queue = $5
                FROM sent s
                WHERE t.run_id = s.run_id AND t.step_slug = s.step_slug AND t.task_index = s.task_index$q$, 'q_' || p_queue)
                USING p_run_ids, p_step_slugs, p_task_indexes, p_delays, p_queue;
            GET DIAGNOSTICS v_count = ROW_COUNT;
            EXIT;
        EXCEPTION WHEN unique_violation THEN
            IF v_try = 2 THEN
                RAISE;
            END IF;
            PERFORM pgflow._renumber(p_queue);
        END;
    END LOOP;
    PERFORM pg_notify('pgflow_queue', p_queue);
    RETURN v_count;
END
$$;

-- Tasks that wait in a queue that is not their step's any more go to the one that is; a step that is done by hand now takes them in hand.
-- Their runs are locked.
CREATE FUNCTION pgflow._reroute(p_run_ids uuid[], p_step_slugs text[], p_task_indexes integer[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_group record;
BEGIN
    FOR v_group IN
        SELECT t.queue, nullif(coalesce(p.queue, f.queue, lower(f.flow_slug)), 'false') AS target, array_agg(t.message_id) AS ids,
            array_agg(t.run_id) AS runs, array_agg(t.step_slug) AS steps, array_agg(t.task_index) AS indexes
        FROM unnest(p_run_ids, p_step_slugs, p_task_indexes) u(run_id, step_slug, task_index)
        JOIN pgflow.step_tasks t ON t.run_id = u.run_id AND t.step_slug = u.step_slug AND t.task_index = u.task_index
        JOIN pgflow.steps p ON p.flow_slug = t.flow_slug AND p.step_slug = t.step_slug
        JOIN pgflow.flows f ON f.flow_slug = t.flow_slug
        WHERE t.status = 'queued' AND t.message_id IS NOT NULL
          AND t.queue IS DISTINCT FROM nullif(coalesce(p.queue, f.queue, lower(f.flow_slug)), 'false')
        GROUP BY 1, 2 ORDER BY 1, 2
    LOOP
        PERFORM pgflow._archive(v_group.queue, v_group.ids);
        IF v_group.target IS NOT NULL THEN
            PERFORM pgflow._send_again(v_group.target, v_group.runs, v_group.steps, v_group.indexes,
                pgflow._delays_left(v_group.queue, v_group.ids));
        ELSE
            UPDATE pgflow.step_tasks t
            SET status = 'started', queue = NULL, message_id = NULL, attempts_count = 1, started_at = greatest(clock_timestamp(), t.queued_at),
                start_number = nextval('pgflow.start_numbers')
            FROM unnest(v_group.runs, v_group.steps, v_group.indexes) u(run_id, step_slug, task_index)
            WHERE t.run_id = u.run_id AND t.step_slug = u.step_slug AND t.task_index = u.task_index;
        END IF;
    END LOOP;
END
$$;

-- How many seconds these messages, which have just been put away, would still have been hidden.
CREATE FUNCTION pgflow._delays_left(p_queue text, p_message_ids bigint[]) RETURNS integer[]
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_delays integer[] := array_fill(0, ARRAY[cardinality(p_message_ids)]);
BEGIN
    IF to_regclass(format('pgmq.%I', 'a_' || p_queue)) IS NOT NULL THEN
        EXECUTE format($q$
            SELECT array_agg(coalesce(greatest(0, ceil(extract(epoch FROM a.vt - clock_timestamp()))), 0)::integer ORDER BY u.place)
            FROM unnest($1) WITH ORDINALITY u(id, place) LEFT JOIN pgmq.%I a ON a.msg_id = u.id$q$, 'a_' || p_queue)
            INTO v_delays USING p_message_ids;
    END IF;
    RETURN v_delays;
END
$$;

-- All that waits of a flow whose queues have changed.
CREATE FUNCTION pgflow._reroute_flow(p_flow_slug text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_tasks record;
BEGIN
    PERFORM 1 FROM pgflow.runs r WHERE r.flow_slug = p_flow_slug AND r.status = 'started' ORDER BY r.run_id FOR UPDATE;
    SELECT array_agg(t.run_id) AS runs, array_agg(t.step_slug) AS steps, array_agg(t.task_index) AS indexes INTO v_tasks
    FROM pgflow.runs r JOIN pgflow.step_tasks t ON t.run_id = r.run_id AND t.status = 'queued'
    WHERE r.flow_slug = p_flow_slug AND r.status = 'started';
    IF v_tasks.runs IS NOT NULL THEN
        PERFORM pgflow._reroute(v_tasks.runs, v_tasks.steps, v_tasks.indexes);
    END IF;
END
$$;

-- The next run of each key whose run, one of these, has ended or waits for nobody. Returns the runs whose turn it is now.
CREATE FUNCTION pgflow._next_of_key(p_run_ids uuid[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_key record;
    v_next pgflow.runs;
    v_runs uuid[] := '{}';
    v_group record;
BEGIN
    FOR v_key IN
        SELECT DISTINCT r.flow_slug, r.key, hashtextextended('pgflow.key:' || r.flow_slug || ':' || r.key, 0) AS lock
        FROM pgflow.runs r
        WHERE r.run_id = ANY (p_run_ids) AND r.key IS NOT NULL AND r.status <> 'started'
        ORDER BY lock, r.flow_slug, r.key
    LOOP
        -- Who starts a run of this key has the lock as well: a run is either seen here, or sees that there is none before it. We do not
        -- wait for one that waits: who has it in hand is about to cancel it, and may wait for one of ours.
        PERFORM pg_advisory_xact_lock(v_key.lock);
        CONTINUE WHEN EXISTS (SELECT FROM pgflow.runs r
            WHERE r.flow_slug = v_key.flow_slug AND r.key = v_key.key AND r.status = 'started');
        SELECT * INTO v_next FROM pgflow.runs r
        WHERE r.flow_slug = v_key.flow_slug AND r.key = v_key.key AND r.status = 'waiting' ORDER BY r.seq LIMIT 1
        FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        UPDATE pgflow.runs r SET status = 'started', started_at = clock_timestamp() WHERE r.run_id = v_next.run_id;
        PERFORM pgflow._tell(ARRAY[jsonb_build_object('event_type', 'run:started', 'run_id', v_next.run_id,
            'flow_slug', v_next.flow_slug, 'status', 'started')]);
        v_runs := v_runs || v_next.run_id;
    END LOOP;
    IF cardinality(v_runs) > 0 THEN
        PERFORM pgflow._resume(v_runs);
    END IF;
    RETURN v_runs;
END
$$;

-- Sends the tasks of these runs that were left without a message, to the queues that their steps have now: while a run waited for its turn
-- they may have been routed elsewhere, or taken in hand.
CREATE FUNCTION pgflow._resume(p_run_ids uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE pgflow.step_tasks t
    SET status = 'started', queue = NULL, attempts_count = 1, started_at = greatest(clock_timestamp(), t.queued_at),
        start_number = nextval('pgflow.start_numbers')
    FROM pgflow.steps p, pgflow.flows f
    WHERE t.run_id = ANY (p_run_ids) AND t.status = 'queued' AND t.message_id IS NULL
      AND p.flow_slug = t.flow_slug AND p.step_slug = t.step_slug AND f.flow_slug = t.flow_slug
      AND pgflow._resolve_queue(p.queue, f.queue, f.flow_slug) IS NULL;
    PERFORM pgflow._send_again(x.queue, x.runs, x.steps, x.indexes, x.delays) FROM (
        SELECT pgflow._resolve_queue(p.queue, f.queue, f.flow_slug) AS queue, array_agg(t.run_id) AS runs, array_agg(t.step_slug) AS steps,
            array_agg(t.task_index) AS indexes, array_agg(0) AS delays
        FROM pgflow.step_tasks t
        JOIN pgflow.steps p ON p.flow_slug = t.flow_slug AND p.step_slug = t.step_slug
        JOIN pgflow.flows f ON f.flow_slug = t.flow_slug
        WHERE t.run_id = ANY (p_run_ids) AND t.status = 'queued' AND t.message_id IS NULL
        GROUP BY 1 ORDER BY 1) x;
END
$$;

-- All that can happen without a worker, until nothing more does. A round that decides something finishes a step at least, so there are
-- no more rounds than steps.
CREATE FUNCTION pgflow._advance(p_run_ids uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_runs uuid[] := p_run_ids;
BEGIN
    WHILE cardinality(v_runs) > 0 LOOP
        LOOP
            EXIT WHEN pgflow._resolve_conditions(v_runs) + pgflow._complete_taskless(v_runs) = 0;
        END LOOP;
        PERFORM pgflow._start_ready(v_runs);
        PERFORM pgflow._complete_runs(v_runs);
        v_runs := pgflow._next_of_key(v_runs);
    END LOOP;
END
$$;

-- The original's names for the parts, for one run.

CREATE FUNCTION pgflow.cascade_resolve_conditions(run_id uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM 1 FROM pgflow.runs r WHERE r.run_id = cascade_resolve_conditions.run_id FOR UPDATE;
    WHILE pgflow._resolve_conditions(ARRAY[cascade_resolve_conditions.run_id]) > 0 LOOP
    END LOOP;
    RETURN (SELECT r.status = 'started' FROM pgflow.runs r WHERE r.run_id = cascade_resolve_conditions.run_id);
END
$$;

CREATE FUNCTION pgflow.cascade_complete_taskless_steps(run_id uuid) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_round integer;
    v_total integer := 0;
BEGIN
    PERFORM 1 FROM pgflow.runs r WHERE r.run_id = cascade_complete_taskless_steps.run_id FOR UPDATE;
    LOOP
        v_round := pgflow._complete_taskless(ARRAY[cascade_complete_taskless_steps.run_id]);
        EXIT WHEN v_round = 0;
        v_total := v_total + v_round;
    END LOOP;
    RETURN v_total;
END
$$;

CREATE FUNCTION pgflow.start_ready_steps(run_id uuid) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM 1 FROM pgflow.runs r WHERE r.run_id = start_ready_steps.run_id FOR UPDATE;
    PERFORM pgflow._start_ready(ARRAY[start_ready_steps.run_id]);
END
$$;

CREATE FUNCTION pgflow.maybe_complete_run(run_id uuid) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM 1 FROM pgflow.runs r WHERE r.run_id = maybe_complete_run.run_id FOR UPDATE;
    PERFORM pgflow._complete_runs(ARRAY[maybe_complete_run.run_id]);
    PERFORM pgflow._advance(pgflow._next_of_key(ARRAY[maybe_complete_run.run_id]));
END
$$;
