-- Who may do what. The functions run with the rights of their owner and check what they are given, so that a worker needs no right on any
-- table, neither of pgflow nor of pgmq: the schema, and the functions of its kind.

DO $$
DECLARE
    v_function record;
BEGIN
    FOR v_function IN SELECT p.oid::regprocedure AS name FROM pg_proc p WHERE p.pronamespace = 'pgflow'::regnamespace LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', v_function.name);
    END LOOP;
END
$$;

-- What each kind of role may call. `client` starts runs and looks at them; `worker` does tasks; `operator` does both, and defines, cancels,
-- retries, deletes and prunes.
CREATE FUNCTION pgflow._functions_of(p_kind text) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_client CONSTANT text[] := ARRAY['start_flow', 'start_flows', 'start_flow_with_states', 'get_run_with_states', 'flow_queues'];
    v_worker CONSTANT text[] := ARRAY['compare_flow_shape', 'flow_queues', 'start_worker', 'heartbeat', 'mark_worker_stopped',
        'track_worker_function', 'read_and_start', 'read_with_poll', 'start_tasks', 'poll_for_tasks', 'set_vt_batch', 'complete_task',
        'complete_tasks', 'fail_task', 'fail_tasks', 'release_tasks', 'release_unknown_tasks', 'extend_tasks', 'requeue_stalled_tasks',
        'requeue_tasks_of_dead_workers', 'repair_queues', 'is_valid_slug', 'calculate_retry_delay'];
BEGIN
    RETURN CASE p_kind
        WHEN 'client' THEN v_client
        WHEN 'worker' THEN v_worker
        WHEN 'operator' THEN v_client || v_worker || ARRAY['create_flow', 'add_step', 'ensure_flow_compiled', '_get_flow_shape', 'cancel_run',
            'cancel_flow', 'retry_run', 'retry_flow', 'delete_run', 'delete_flow_and_data', 'prune_data_older_than']
        END;
END
$$;

-- Gives a role the rights of a kind: SELECT pgflow.grant_role('my_worker', 'worker'). The owner of the schema calls it.
CREATE FUNCTION pgflow.grant_role(role text, kind text) RETURNS void
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
        EXECUTE format('GRANT SELECT ON pgflow.flows, pgflow.steps, pgflow.deps, pgflow.runs, pgflow.step_states, pgflow.step_tasks, pgflow.workers TO %I', role);
    END IF;
    -- The rows that come back have types of this schema.
    EXECUTE format('GRANT USAGE ON TYPE pgflow.step_task_record TO %I', role);
END
$$;

REVOKE ALL ON FUNCTION pgflow.grant_role(text, text) FROM PUBLIC;
REVOKE ALL ON FUNCTION pgflow._functions_of(text) FROM PUBLIC;
