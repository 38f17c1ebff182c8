-- What is counted for who watches. Workers add to a row of their queue once per sign of life, so that nothing is counted where tasks are done,
-- and what is known of a queue outlives its workers. How many runs and tasks are alive is counted when somebody asks, over indexes of what is alive.

CREATE TABLE pgflow.queue_counts (
    queue text NOT NULL,
    -- Reads that asked this queue.
    polls bigint NOT NULL DEFAULT 0,
    -- Tasks that were read and started.
    taken bigint NOT NULL DEFAULT 0,
    -- What came of them: done; failed and tried again; failed for good; another's, or over, when they ended.
    completed bigint NOT NULL DEFAULT 0,
    retried bigint NOT NULL DEFAULT 0,
    failed bigint NOT NULL DEFAULT 0,
    lost bigint NOT NULL DEFAULT 0,
    -- How long handlers took, all together, and how many of them ended within each of the bounds of _handler_bounds, the last place for those beyond.
    handler_seconds double precision NOT NULL DEFAULT 0,
    handlers bigint[] NOT NULL,
    counted_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT queue_counts_pkey PRIMARY KEY (queue),
    CONSTRAINT queue_counts_queue_fkey FOREIGN KEY (queue) REFERENCES pgflow.queues (queue) ON DELETE CASCADE
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- "How many runs of a flow are alive": it holds those only.
CREATE INDEX idx_runs_live ON pgflow.runs (flow_slug, status) WHERE status IN ('started', 'waiting');

-- In seconds. The same in every worker, so that their numbers can be added.
CREATE FUNCTION pgflow._handler_bounds() RETURNS double precision[]
LANGUAGE sql IMMUTABLE SET search_path TO pg_catalog, pg_temp
AS $$ SELECT ARRAY[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300]::double precision[] $$;

-- Adds what a worker has counted since it last did: an array of objects with the columns of queue_counts, of which only `queue` must be there. A queue that
-- no flow uses any more is left out. Returns how many rows were changed.
CREATE FUNCTION pgflow.count_tasks(counts jsonb) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_places CONSTANT integer := cardinality(pgflow._handler_bounds()) + 1;
    v_none CONSTANT bigint[] := array_fill(0::bigint, ARRAY[v_places]);
    v_changed integer;
BEGIN
    IF jsonb_typeof(count_tasks.counts) IS DISTINCT FROM 'array' OR jsonb_array_length(count_tasks.counts) > 1000 THEN
        RAISE EXCEPTION 'count_tasks takes an array of at most 1000 objects' USING ERRCODE = 'PF001';
    END IF;
    IF EXISTS (SELECT FROM jsonb_to_recordset(count_tasks.counts)
            AS c(queue text, polls bigint, taken bigint, completed bigint, retried bigint, failed bigint, lost bigint,
                 handler_seconds double precision, handlers bigint[])
            WHERE c.queue IS NULL OR cardinality(coalesce(c.handlers, v_none)) <> v_places
               OR 0 > ANY (coalesce(c.handlers, v_none)) OR array_position(c.handlers, NULL) IS NOT NULL
               OR 1000000000000 < ANY (coalesce(c.handlers, v_none))
               OR least(c.polls, c.taken, c.completed, c.retried, c.failed, c.lost) < 0
               OR greatest(c.polls, c.taken, c.completed, c.retried, c.failed, c.lost) > 1000000000000
               OR NOT coalesce(c.handler_seconds, 0) BETWEEN 0 AND 1e12) THEN
        RAISE EXCEPTION 'count_tasks takes a queue and numbers from 0 to a million millions; % of them for handlers', v_places USING ERRCODE = 'PF001';
    END IF;
    INSERT INTO pgflow.queue_counts AS q (queue, polls, taken, completed, retried, failed, lost, handler_seconds, handlers)
    SELECT c.queue, coalesce(c.polls, 0), coalesce(c.taken, 0), coalesce(c.completed, 0), coalesce(c.retried, 0), coalesce(c.failed, 0),
        coalesce(c.lost, 0), coalesce(c.handler_seconds, 0), coalesce(c.handlers, v_none)
    FROM (SELECT DISTINCT ON (r.queue) r.* FROM jsonb_to_recordset(count_tasks.counts)
            AS r(queue text, polls bigint, taken bigint, completed bigint, retried bigint, failed bigint, lost bigint,
                 handler_seconds double precision, handlers bigint[]) ORDER BY r.queue) c
    JOIN pgflow.queues k ON k.queue = c.queue
    -- Always in this order, so that workers of the same queues do not wait in a circle.
    ORDER BY c.queue
    ON CONFLICT (queue) DO UPDATE SET
        polls = q.polls + excluded.polls, taken = q.taken + excluded.taken, completed = q.completed + excluded.completed,
        retried = q.retried + excluded.retried, failed = q.failed + excluded.failed, lost = q.lost + excluded.lost,
        handler_seconds = q.handler_seconds + excluded.handler_seconds,
        handlers = ARRAY(SELECT a.n + b.n FROM unnest(q.handlers) WITH ORDINALITY a(n, place)
                         JOIN unnest(excluded.handlers) WITH ORDINALITY b(n, place) USING (place) ORDER BY place),
        counted_at = clock_timestamp();
    GET DIAGNOSTICS v_changed = ROW_COUNT;
    RETURN v_changed;
END
$$;

-- What each kind of role may call, with what is new here.
CREATE OR REPLACE FUNCTION pgflow._functions_of(p_kind text) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_client CONSTANT text[] := ARRAY['start_flow', 'start_flows', 'start_flow_with_states', 'get_run_with_states', 'flow_queues'];
    v_worker CONSTANT text[] := ARRAY['compare_flow_shape', 'flow_queues', 'start_worker', 'heartbeat', 'mark_worker_stopped',
        'track_worker_function', 'read_and_start', 'read_with_poll', 'start_tasks', 'poll_for_tasks', 'set_vt_batch', 'complete_task',
        'complete_tasks', 'fail_task', 'fail_tasks', 'release_tasks', 'release_unknown_tasks', 'extend_tasks', 'requeue_stalled_tasks',
        'requeue_tasks_of_dead_workers', 'repair_queues', 'is_valid_slug', 'calculate_retry_delay', 'count_tasks'];
BEGIN
    RETURN CASE p_kind
        WHEN 'client' THEN v_client
        WHEN 'worker' THEN v_worker
        WHEN 'operator' THEN v_client || v_worker || ARRAY['create_flow', 'add_step', 'ensure_flow_compiled', '_get_flow_shape', 'cancel_run',
            'cancel_flow', 'retry_run', 'retry_flow', 'delete_run', 'delete_flow_and_data', 'prune_data_older_than']
        END;
END
$$;

CREATE OR REPLACE FUNCTION pgflow.grant_role(role text, kind text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_function record;
BEGIN
    IF pgflow._functions_of(kind) IS NULL THEN
        RAISE EXCEPTION '% is no kind of role', quote_nullable(kind) USING ERRCODE = 'PF001', HINT = 'There are: worker, client, operator.';
    END IF;
    EXECUTE format('GRANT USAGE ON SCHEMA pgflow TO %I', role);
    FOR v_function IN
        SELECT p.oid::regprocedure AS name FROM pg_proc p
        WHERE p.pronamespace = 'pgflow'::regnamespace AND p.proname = ANY (pgflow._functions_of(kind))
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', v_function.name, role);
    END LOOP;
    IF kind <> 'worker' THEN
        EXECUTE format('GRANT SELECT ON pgflow.flows, pgflow.steps, pgflow.deps, pgflow.runs, pgflow.step_states, pgflow.step_tasks, pgflow.workers,
            pgflow.queue_counts TO %I', role);
    END IF;
    -- The rows that come back have types of this schema.
    EXECUTE format('GRANT USAGE ON TYPE pgflow.step_task_record TO %I', role);
END
$$;

REVOKE ALL ON FUNCTION pgflow._handler_bounds() FROM PUBLIC;
REVOKE ALL ON FUNCTION pgflow.count_tasks(jsonb) FROM PUBLIC;

-- Roles that were given the rights of a kind before this was here: who may give signs of life may count, and who may look at workers may look at this.
DO $$
DECLARE
    v_role record;
BEGIN
    FOR v_role IN
        SELECT DISTINCT r.rolname AS name FROM pg_proc p CROSS JOIN LATERAL aclexplode(p.proacl) a JOIN pg_roles r ON r.oid = a.grantee
        WHERE p.pronamespace = 'pgflow'::regnamespace AND p.proname = 'heartbeat' AND a.privilege_type = 'EXECUTE' AND a.grantee <> p.proowner
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION pgflow.count_tasks(jsonb) TO %I', v_role.name);
    END LOOP;
    FOR v_role IN
        SELECT DISTINCT r.rolname AS name FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) a JOIN pg_roles r ON r.oid = a.grantee
        WHERE c.oid = 'pgflow.workers'::regclass AND a.privilege_type = 'SELECT' AND a.grantee <> c.relowner
    LOOP
        EXECUTE format('GRANT SELECT ON pgflow.queue_counts TO %I', v_role.name);
    END LOOP;
END
$$;
