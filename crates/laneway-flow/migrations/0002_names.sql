-- Names: what a slug and a queue may be called, and which queue a step means. Errors of ours have codes of their own:
--   PF001 a bad name or argument      PF002 an unknown flow, step or run   PF003 a payload over the limit
--   PF004 a queue that is not there   PF005 a mistake in a graph           PF006 an idempotency key with another input
--   PF007 an input without the key

CREATE FUNCTION pgflow.is_valid_slug(slug text) RETURNS boolean
LANGUAGE sql IMMUTABLE SET search_path TO pg_catalog, pg_temp
AS $$
    SELECT slug IS NOT NULL AND slug <> 'run' AND length(slug) <= 128 AND slug ~ '^[a-zA-Z_][a-zA-Z0-9_]*$'
$$;

CREATE FUNCTION pgflow._require_slug(p_kind text, p_slug text) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT pgflow.is_valid_slug(p_slug) THEN
        RAISE EXCEPTION '% is not a slug for a %', coalesce(quote_literal(left(p_slug, 200)), 'NULL'), p_kind
            USING ERRCODE = 'PF001', HINT = 'A slug has 1 to 128 letters, digits and underscores, begins with no digit, and is not "run".';
    END IF;
END
$$;

-- The name by which a queue is known everywhere: lower case, because pgmq makes one table of Email and email.
CREATE FUNCTION pgflow._queue_name(p_queue text) RETURNS text
LANGUAGE plpgsql IMMUTABLE SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    IF p_queue IS NULL OR p_queue ~ '^[a-zA-Z_][a-zA-Z0-9_]{0,46}$' THEN
        RETURN lower(p_queue);
    END IF;
    RAISE EXCEPTION '% is not a name for a queue', quote_literal(left(p_queue, 200))
        USING ERRCODE = 'PF001', HINT = 'A queue has 1 to 47 letters, digits and underscores, and begins with no digit; false means completed by hand.';
END
$$;

-- Where the tasks of a step go. NULL: nowhere, they are completed by hand.
CREATE FUNCTION pgflow._resolve_queue(p_step_queue text, p_flow_queue text, p_flow_slug text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path TO pg_catalog, pg_temp
AS $$
    SELECT nullif(coalesce(p_step_queue, p_flow_queue, lower(p_flow_slug)), 'false')
$$;

CREATE FUNCTION pgflow._queue_exists(p_queue text) RETURNS boolean
LANGUAGE sql STABLE SET search_path TO pg_catalog, pg_temp
AS $$
    SELECT to_regclass(format('pgmq.%I', 'q_' || p_queue)) IS NOT NULL AND to_regclass(format('pgmq.%I', 'a_' || p_queue)) IS NOT NULL
$$;

-- Who may work on flows may not read other people's queues through us.
CREATE FUNCTION pgflow._require_queue(p_queue text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pgflow.queues q WHERE q.queue = p_queue) THEN
        RAISE EXCEPTION 'no flow has a queue %', coalesce(quote_literal(p_queue), 'NULL')
            USING ERRCODE = 'PF004', HINT = 'A queue is made with the flow or the step that names it.';
    END IF;
    IF NOT pgflow._queue_exists(p_queue) THEN
        RAISE EXCEPTION 'the queue % is not there', quote_literal(p_queue)
            USING ERRCODE = 'PF004',
                  DETAIL = 'Its table was dropped. The tasks that wait in it are still known.',
                  HINT = format('SELECT pgflow.repair_queues(ARRAY[%L]) makes it again, with its messages.', p_queue);
    END IF;
END
$$;

-- A queue that was made again counts its messages from 1. Numbers that are known here, or are in the archive, must not come twice.
CREATE FUNCTION pgflow._renumber(p_queue text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_archived bigint;
    v_known bigint := (SELECT max(t.message_id) FROM pgflow.step_tasks t WHERE t.queue = p_queue);
    v_sequence text := pg_get_serial_sequence(format('pgmq.%I', 'q_' || p_queue), 'msg_id');
BEGIN
    EXECUTE format('SELECT max(msg_id) FROM pgmq.%I', 'a_' || p_queue) INTO v_archived;
    IF num_nonnulls(v_known, v_archived) > 0 THEN
        PERFORM setval(v_sequence, greatest(v_known, v_archived, nextval(v_sequence)));
    END IF;
END
$$;

CREATE FUNCTION pgflow._create_queue(p_queue text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgmq.create(p_queue);
    -- Every message of a queue dies within minutes: vacuum must come by numbers.
    EXECUTE format('ALTER TABLE pgmq.%I SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000)', 'q_' || p_queue);
END
$$;

-- For who sends: a queue that was dropped by hand comes back, so that no task has to fail for it. Its other messages are sent by who repairs.
CREATE FUNCTION pgflow._revive_queue(p_queue text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT pgflow._queue_exists(p_queue) THEN
        PERFORM pgflow._create_queue(p_queue);
        PERFORM pgflow._renumber(p_queue);
    END IF;
END
$$;

-- The queue is there, with the messages of its tasks.
CREATE FUNCTION pgflow._ensure_queue(p_queue text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    IF p_queue IS NULL OR EXISTS (SELECT FROM pgflow.queues q
            WHERE q.queue = p_queue AND q.relation = to_regclass(format('pgmq.%I', 'q_' || p_queue)) AND pgflow._queue_exists(p_queue)) THEN
        RETURN;
    END IF;
    PERFORM pgflow._repair_queue(p_queue);
END
$$;

-- Ids of runs grow with time, so that a million finished runs are not in the way of a new one: its rows go to the end of the indexes.
CREATE FUNCTION pgflow._new_run_id() RETURNS uuid
LANGUAGE sql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
    SELECT encode(
        set_bit(set_bit(
            overlay(uuid_send(gen_random_uuid())
                placing substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3) FROM 1 FOR 6),
            52, 1), 53, 1),
        'hex')::uuid
$$;

CREATE FUNCTION pgflow._require_payload(p_what text, p_payload jsonb) RETURNS void
LANGUAGE plpgsql STABLE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_limit integer := (SELECT max_payload_bytes FROM pgflow.limits);
BEGIN
    IF pg_column_size(p_payload) > v_limit THEN
        RAISE EXCEPTION '% has % bytes, over the limit of %', p_what, pg_column_size(p_payload), v_limit
            USING ERRCODE = 'PF003', HINT = 'pgflow.limits has the limit; large data is better kept elsewhere and passed by its address.';
    END IF;
END
$$;
