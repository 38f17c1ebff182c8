-- What Laneway adds to a database beside pgmq: kept messages, deduplication, leases, and publishing in order.
--
-- Run as a whole, in one transaction, by whoever opens a queue and finds another version or none. Every statement may run again.

CREATE SCHEMA IF NOT EXISTS laneway_queue;

CREATE TABLE IF NOT EXISTS laneway_queue.version (
    only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    version  integer NOT NULL
);

-- Dead letters and what is in quarantine, as they were in their queue.
CREATE TABLE IF NOT EXISTS laneway_queue.kept (
    place       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue       text NOT NULL,
    kind        text NOT NULL CHECK (kind IN ('dead', 'quarantine')),
    msg_id      bigint NOT NULL,
    read_ct     integer NOT NULL,
    enqueued_at timestamptz NOT NULL,
    kept_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    reason      text NOT NULL,
    message     jsonb,
    headers     jsonb
);
CREATE INDEX IF NOT EXISTS kept_by_queue ON laneway_queue.kept (queue, kind, place);

-- Deduplication ids that are remembered.
CREATE TABLE IF NOT EXISTS laneway_queue.seen (
    queue     text NOT NULL,
    id        text NOT NULL,
    msg_id    bigint NOT NULL,
    forget_at timestamptz NOT NULL,
    PRIMARY KEY (queue, id)
);
CREATE INDEX IF NOT EXISTS seen_by_end ON laneway_queue.seen (forget_at);

-- Who may work, where only one may. The token grows with every holder.
CREATE TABLE IF NOT EXISTS laneway_queue.lease (
    name   text PRIMARY KEY,
    holder text NOT NULL,
    token  bigint NOT NULL,
    ends   timestamptz NOT NULL
);

-- The group of a message, as pgmq's grouped reads see it, but that an empty name is none. `statements.rs` writes it out, for the index.
CREATE OR REPLACE FUNCTION laneway_queue.group_of(headers jsonb) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(nullif(headers ->> 'x-pgmq-group', ''), '_default_fifo_group') COLLATE "C";

-- Publishers of one group take turns, or a message could become visible in front of one that is already being delivered. A group has one of
-- 1024 locks, so that a publication of any size holds no more of them than the server has room for.
CREATE OR REPLACE FUNCTION laneway_queue.turn_of(name text) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN hashtext(name) & 1023;

-- Runs before each row that is inserted into a queue, whoever inserts it. The number of the row was drawn before its turn came, so it is drawn
-- again. Arguments: the sequence of the numbers, and whether messages without a group are one group.
CREATE OR REPLACE FUNCTION laneway_queue.take_turn() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    name text := laneway_queue.group_of(NEW.headers);
BEGIN
    IF name <> '_default_fifo_group' OR TG_ARGV[1] = 'serial' THEN
        PERFORM pg_advisory_xact_lock(TG_RELID::integer, laneway_queue.turn_of(name));
        NEW.msg_id := nextval(TG_ARGV[0]::regclass);
    END IF;
    RETURN NEW;
END
$$;

-- Runs after each statement that inserts into a queue: wakes those who wait. One transaction at a time does it, and the others need not wait for it: a
-- commit that signals takes its turn with all others of the server that do, and a lock that lasts until the end of a long transaction would
-- stop every publisher. Whoever waits looks often after a signal, so what comes beside it is found soon.
CREATE OR REPLACE FUNCTION laneway_queue.signal() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF pg_try_advisory_xact_lock(TG_RELID::integer, -1) THEN
        PERFORM pg_notify('laneway_queue.' || TG_TABLE_NAME, '');
    END IF;
    RETURN NULL;
END
$$;

-- Publishes texts in this order, all or none. A message whose deduplication id was seen within the window is not stored again; the answer has the
-- number of the one that it repeats.
CREATE OR REPLACE FUNCTION laneway_queue.publish(
    queue_name text,
    texts      text[],
    groups     text[] DEFAULT NULL,
    ids        text[] DEFAULT NULL,
    delays     float8[] DEFAULT NULL,
    forms      text[] DEFAULT NULL,
    remember   float8 DEFAULT 300
) RETURNS TABLE (place integer, msg_id bigint, duplicate boolean)
LANGUAGE plpgsql
-- Consumers keep the planner to the indexes; here it joins what has none.
SET enable_hashjoin = on SET enable_mergejoin = on SET enable_seqscan = on AS $$
DECLARE
    queue_table text := pgmq.format_table_name(queue_name, 'q');
    turn integer;
    fresh text[];
BEGIN
    -- All turns at once and in one order, so that two publications never wait for each other in a circle.
    FOR turn IN
        SELECT DISTINCT laneway_queue.turn_of(name COLLATE "C") AS number
        FROM unnest(groups) AS name WHERE name <> '' ORDER BY number
    LOOP
        PERFORM pg_advisory_xact_lock(format('pgmq.%I', queue_table)::regclass::oid::integer, turn);
    END LOOP;
    IF ids IS NOT NULL THEN
        DELETE FROM laneway_queue.seen WHERE (seen.queue, seen.id) IN (
            SELECT old.queue, old.id FROM laneway_queue.seen old WHERE old.forget_at <= clock_timestamp()
            LIMIT 1000 FOR UPDATE SKIP LOCKED);
        WITH asked AS (SELECT DISTINCT name FROM unnest(ids) AS name WHERE name IS NOT NULL ORDER BY name),
        noted AS (
            INSERT INTO laneway_queue.seen AS seen (queue, id, msg_id, forget_at)
            SELECT queue_name, asked.name, 0, clock_timestamp() + make_interval(secs => remember) FROM asked
            ON CONFLICT (queue, id) DO UPDATE SET msg_id = 0, forget_at = excluded.forget_at
                WHERE seen.forget_at <= clock_timestamp()
            RETURNING seen.id)
        SELECT array_agg(noted.id) INTO fresh FROM noted;
    END IF;
    RETURN QUERY EXECUTE format($query$
        WITH asked AS (
            SELECT row_number() OVER () AS place, * FROM unnest($1, $2, $3, $4, $5) AS it(body, name, id, delay, form)),
        ranked AS (
            SELECT *, id IS NULL OR (id = ANY($6) AND place = min(place) OVER (PARTITION BY id)) AS is_new FROM asked),
        stored AS (
            INSERT INTO pgmq.%1$I (vt, message, headers)
            SELECT clock_timestamp() + make_interval(secs => coalesce(delay, 0)), to_jsonb(body),
                jsonb_strip_nulls(jsonb_build_object(
                    'x-pgmq-group', nullif(name, ''), 'x-laneway-text', coalesce(form, 'plain')))
            FROM ranked WHERE is_new ORDER BY place
            RETURNING msg_id),
        -- Rows get their numbers one after another, in the order in which they were asked for.
        answered AS (
            SELECT new.place, new.id, given.msg_id
            FROM (SELECT place, id, row_number() OVER (ORDER BY place) AS nth FROM ranked WHERE is_new) AS new
            JOIN (SELECT msg_id, row_number() OVER (ORDER BY msg_id) AS nth FROM stored) AS given USING (nth)),
        noted AS (
            UPDATE laneway_queue.seen SET msg_id = answered.msg_id
            FROM answered WHERE seen.queue = $7 AND seen.id = answered.id
            RETURNING seen.id, seen.msg_id)
        SELECT ranked.place::integer, coalesce(answered.msg_id, noted.msg_id, seen.msg_id), answered.msg_id IS NULL
        FROM ranked
            LEFT JOIN answered ON answered.place = ranked.place
            LEFT JOIN noted ON noted.id = ranked.id
            LEFT JOIN laneway_queue.seen ON seen.queue = $7 AND seen.id = ranked.id
        ORDER BY ranked.place
    $query$, queue_table) USING texts, groups, ids, delays, forms, fresh, queue_name;
END
$$;

INSERT INTO laneway_queue.version (version) VALUES (1) ON CONFLICT (only_one) DO UPDATE SET version = excluded.version;
