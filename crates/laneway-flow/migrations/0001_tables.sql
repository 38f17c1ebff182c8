-- The tables. A definition is flows, steps and deps; what happens is runs, step_states and step_tasks; who does it is workers.
--
-- Times are written by clock_timestamp(): a transaction that began before a task was made may still start it, and the order of
-- the times of a row is checked.

CREATE TABLE pgflow.flows (
    flow_slug text NOT NULL,
    opt_max_attempts integer NOT NULL DEFAULT 3,
    opt_base_delay integer NOT NULL DEFAULT 1,
    opt_timeout integer NOT NULL DEFAULT 60,
    created_at timestamptz NOT NULL DEFAULT now(),
    -- The queue of the steps that name none. NULL: the slug. 'false': completed by hand.
    queue text,
    -- Where in the input the key of a run is found. Runs of one key go one after another. NULL: runs have no key.
    key_path text[],
    CONSTRAINT flows_pkey PRIMARY KEY (flow_slug),
    CONSTRAINT opt_base_delay_is_nonnegative CHECK (opt_base_delay >= 0),
    CONSTRAINT opt_max_attempts_is_nonnegative CHECK (opt_max_attempts >= 0),
    CONSTRAINT opt_timeout_is_positive CHECK (opt_timeout > 0),
    CONSTRAINT slug_is_valid CHECK (flow_slug ~ '^[a-zA-Z_][a-zA-Z0-9_]*$' AND length(flow_slug) <= 128 AND flow_slug <> 'run')
);

CREATE TABLE pgflow.steps (
    flow_slug text NOT NULL,
    step_slug text NOT NULL,
    step_type text NOT NULL DEFAULT 'single',
    step_index integer NOT NULL DEFAULT 0,
    deps_count integer NOT NULL DEFAULT 0,
    opt_max_attempts integer,
    opt_base_delay integer,
    opt_timeout integer,
    created_at timestamptz NOT NULL DEFAULT now(),
    opt_start_delay integer,
    required_input_pattern jsonb,
    forbidden_input_pattern jsonb,
    when_unmet text NOT NULL DEFAULT 'skip',
    when_exhausted text NOT NULL DEFAULT 'fail',
    -- NULL: the flow's. 'false': completed by hand.
    queue text,
    CONSTRAINT steps_pkey PRIMARY KEY (flow_slug, step_slug),
    CONSTRAINT steps_flow_slug_step_index_key UNIQUE (flow_slug, step_index),
    CONSTRAINT steps_flow_slug_fkey FOREIGN KEY (flow_slug) REFERENCES pgflow.flows (flow_slug),
    CONSTRAINT forbidden_input_pattern_is_object CHECK (jsonb_typeof(forbidden_input_pattern) = 'object'),
    CONSTRAINT opt_base_delay_is_nonnegative CHECK (opt_base_delay >= 0),
    CONSTRAINT opt_max_attempts_is_nonnegative CHECK (opt_max_attempts >= 0),
    CONSTRAINT opt_start_delay_is_nonnegative CHECK (opt_start_delay >= 0),
    CONSTRAINT opt_timeout_is_positive CHECK (opt_timeout > 0),
    CONSTRAINT required_input_pattern_is_object CHECK (jsonb_typeof(required_input_pattern) = 'object'),
    CONSTRAINT steps_deps_count_check CHECK (deps_count >= 0),
    CONSTRAINT steps_step_slug_check CHECK (step_slug ~ '^[a-zA-Z_][a-zA-Z0-9_]*$' AND length(step_slug) <= 128 AND step_slug <> 'run'),
    CONSTRAINT steps_step_type_check CHECK (step_type IN ('single', 'map')),
    CONSTRAINT when_exhausted_is_valid CHECK (when_exhausted IN ('fail', 'skip', 'skip-cascade')),
    CONSTRAINT when_unmet_is_valid CHECK (when_unmet IN ('fail', 'skip', 'skip-cascade'))
);

CREATE TABLE pgflow.deps (
    flow_slug text NOT NULL,
    dep_slug text NOT NULL,
    step_slug text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT deps_pkey PRIMARY KEY (flow_slug, dep_slug, step_slug),
    CONSTRAINT deps_flow_slug_fkey FOREIGN KEY (flow_slug) REFERENCES pgflow.flows (flow_slug),
    CONSTRAINT deps_flow_slug_dep_slug_fkey FOREIGN KEY (flow_slug, dep_slug) REFERENCES pgflow.steps (flow_slug, step_slug),
    CONSTRAINT deps_flow_slug_step_slug_fkey FOREIGN KEY (flow_slug, step_slug) REFERENCES pgflow.steps (flow_slug, step_slug),
    CONSTRAINT deps_check CHECK (dep_slug <> step_slug)
);
-- "What does this step wait for", asked whenever a task starts.
CREATE INDEX idx_deps_by_flow_step ON pgflow.deps (flow_slug, step_slug);

CREATE TABLE pgflow.runs (
    run_id uuid NOT NULL DEFAULT gen_random_uuid(),
    flow_slug text NOT NULL,
    status text NOT NULL DEFAULT 'started',
    input jsonb NOT NULL,
    output jsonb,
    remaining_steps integer NOT NULL DEFAULT 0,
    started_at timestamptz NOT NULL DEFAULT now(),
    completed_at timestamptz,
    failed_at timestamptz,
    cancelled_at timestamptz,
    error_message text,
    -- Runs of one flow and key go one after another, in the order of seq.
    key text,
    seq bigint GENERATED ALWAYS AS IDENTITY,
    -- A second start with the same key is the first one.
    idempotency_key text,
    CONSTRAINT runs_pkey PRIMARY KEY (run_id),
    CONSTRAINT runs_flow_slug_fkey FOREIGN KEY (flow_slug) REFERENCES pgflow.flows (flow_slug),
    CONSTRAINT completed_at_is_after_started_at CHECK (completed_at >= started_at),
    CONSTRAINT completed_at_or_failed_at CHECK (num_nonnulls(completed_at, failed_at, cancelled_at) <= 1),
    CONSTRAINT failed_at_is_after_started_at CHECK (failed_at >= started_at),
    CONSTRAINT runs_remaining_steps_check CHECK (remaining_steps >= 0),
    CONSTRAINT status_is_valid CHECK (status IN ('started', 'waiting', 'completed', 'failed', 'cancelled'))
) WITH (fillfactor = 80);
CREATE INDEX idx_runs_flow_slug ON pgflow.runs (flow_slug, seq);
-- "The newest runs", of whatever flow.
CREATE INDEX idx_runs_seq ON pgflow.runs (seq);
-- Only what is not finished: it stays small whatever has been run.
CREATE INDEX idx_runs_live_key ON pgflow.runs (flow_slug, key, seq) WHERE key IS NOT NULL AND status IN ('started', 'waiting');
CREATE UNIQUE INDEX unique_idempotency_key ON pgflow.runs (flow_slug, idempotency_key) WHERE idempotency_key IS NOT NULL;

CREATE TABLE pgflow.step_states (
    flow_slug text NOT NULL,
    run_id uuid NOT NULL,
    step_slug text NOT NULL,
    status text NOT NULL DEFAULT 'created',
    remaining_tasks integer,
    remaining_deps integer NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now(),
    started_at timestamptz,
    completed_at timestamptz,
    failed_at timestamptz,
    error_message text,
    initial_tasks integer,
    output jsonb,
    skip_reason text,
    skipped_at timestamptz,
    -- Of the outputs of its tasks that are completed, together.
    output_bytes bigint NOT NULL DEFAULT 0,
    CONSTRAINT step_states_pkey PRIMARY KEY (run_id, step_slug),
    CONSTRAINT step_states_run_id_fkey FOREIGN KEY (run_id) REFERENCES pgflow.runs (run_id),
    CONSTRAINT step_states_flow_slug_step_slug_fkey FOREIGN KEY (flow_slug, step_slug) REFERENCES pgflow.steps (flow_slug, step_slug),
    CONSTRAINT completed_at_is_after_started_at CHECK (completed_at >= started_at),
    CONSTRAINT completed_at_or_failed_at_or_skipped_at CHECK (num_nonnulls(completed_at, failed_at, skipped_at) <= 1),
    CONSTRAINT failed_at_is_after_started_at CHECK (failed_at >= started_at),
    CONSTRAINT initial_tasks_known_when_started CHECK (status <> 'started' OR initial_tasks IS NOT NULL),
    CONSTRAINT output_only_for_completed_or_null CHECK (output IS NULL OR status = 'completed'),
    CONSTRAINT remaining_tasks_state_consistency CHECK (remaining_tasks IS NULL OR status <> 'created'),
    CONSTRAINT skip_reason_matches_status CHECK ((status = 'skipped') = (skip_reason IS NOT NULL)),
    CONSTRAINT skipped_at_is_after_created_at CHECK (skipped_at >= created_at),
    CONSTRAINT started_at_is_after_created_at CHECK (started_at >= created_at),
    CONSTRAINT status_and_remaining_tasks_match CHECK (status <> 'completed' OR remaining_tasks = 0),
    CONSTRAINT status_is_valid CHECK (status IN ('created', 'started', 'completed', 'failed', 'skipped')),
    CONSTRAINT step_states_initial_tasks_check CHECK (initial_tasks >= 0),
    CONSTRAINT step_states_remaining_tasks_check CHECK (remaining_tasks >= 0),
    CONSTRAINT step_states_remaining_deps_check CHECK (remaining_deps >= 0)
) WITH (fillfactor = 70);

CREATE TABLE pgflow.workers (
    worker_id uuid NOT NULL,
    queue_name text NOT NULL,
    function_name text NOT NULL,
    started_at timestamptz NOT NULL DEFAULT now(),
    deprecated_at timestamptz,
    last_heartbeat_at timestamptz NOT NULL DEFAULT now(),
    stopped_at timestamptz,
    -- All that it reads; queue_name is the first of them.
    queues text[],
    CONSTRAINT workers_pkey PRIMARY KEY (worker_id)
);

CREATE TABLE pgflow.worker_functions (
    function_name text NOT NULL,
    enabled boolean NOT NULL DEFAULT true,
    debounce interval NOT NULL DEFAULT '6 seconds',
    last_invoked_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT worker_functions_pkey PRIMARY KEY (function_name),
    CONSTRAINT worker_functions_debounce_check CHECK (debounce >= interval '1 second')
);

CREATE SEQUENCE pgflow.start_numbers;

CREATE TABLE pgflow.step_tasks (
    flow_slug text NOT NULL,
    run_id uuid NOT NULL,
    step_slug text NOT NULL,
    message_id bigint,
    task_index integer NOT NULL DEFAULT 0,
    status text NOT NULL DEFAULT 'queued',
    attempts_count integer NOT NULL DEFAULT 0,
    error_message text,
    output jsonb,
    queued_at timestamptz NOT NULL DEFAULT now(),
    completed_at timestamptz,
    failed_at timestamptz,
    started_at timestamptz,
    last_worker_id uuid,
    requeued_count integer NOT NULL DEFAULT 0,
    last_requeued_at timestamptz,
    permanently_stalled_at timestamptz,
    -- Where its message is; NULL for a task that is completed by hand. It stays what it was when the task was made.
    queue text,
    -- What a task of a map works on, taken out of the array once: a wide array is not read again for each of its elements.
    element jsonb,
    -- Until when its worker has asked for more time than the timeout gives.
    extended_until timestamptz,
    -- Of its last start: a number that no other start of any task has had. Attempts are counted anew after a retry of the run and are given
    -- back with a task that is handed back; this grows for ever, so that only who started the task last can settle it.
    start_number bigint,
    CONSTRAINT step_tasks_pkey PRIMARY KEY (run_id, step_slug, task_index),
    CONSTRAINT step_tasks_last_worker_id_fkey FOREIGN KEY (last_worker_id) REFERENCES pgflow.workers (worker_id) ON DELETE SET NULL,
    -- The run and the flow of a task are those of its state; keys to them as well would be checked for every task of a map.
    CONSTRAINT step_tasks_run_id_step_slug_fkey FOREIGN KEY (run_id, step_slug) REFERENCES pgflow.step_states (run_id, step_slug),
    CONSTRAINT attempts_count_nonnegative CHECK (attempts_count >= 0),
    CONSTRAINT completed_at_is_after_queued_at CHECK (completed_at >= queued_at),
    CONSTRAINT completed_at_is_after_started_at CHECK (completed_at >= started_at),
    CONSTRAINT completed_at_or_failed_at CHECK (num_nonnulls(completed_at, failed_at) <= 1),
    CONSTRAINT failed_at_is_after_queued_at CHECK (failed_at >= queued_at),
    CONSTRAINT failed_at_is_after_started_at CHECK (failed_at >= started_at),
    CONSTRAINT output_valid_only_for_completed CHECK (output IS NULL OR status = 'completed'),
    CONSTRAINT started_at_is_after_queued_at CHECK (started_at >= queued_at),
    CONSTRAINT valid_status CHECK (status IN ('queued', 'started', 'completed', 'failed'))
) WITH (fillfactor = 80);

-- A message id says which task is meant only together with its queue. This is also the way from a message to its task.
CREATE UNIQUE INDEX unique_msg_per_queue ON pgflow.step_tasks (queue, message_id) WHERE message_id IS NOT NULL;
-- Both hold what is alive, and stay small whatever has been run.
CREATE INDEX idx_step_tasks_queue_status ON pgflow.step_tasks (queue, status) WHERE queue IS NOT NULL AND status = 'queued';
CREATE INDEX idx_step_tasks_queue_worker ON pgflow.step_tasks (queue, last_worker_id) WHERE queue IS NOT NULL AND status = 'started';
-- For ON DELETE SET NULL, when workers are pruned.
CREATE INDEX idx_step_tasks_live_worker ON pgflow.step_tasks (last_worker_id) WHERE status = 'started';

-- What changes a lot is vacuumed by numbers, not by shares of a table that may hold a million finished rows.
ALTER TABLE pgflow.runs SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.05);
ALTER TABLE pgflow.step_states SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.05);
ALTER TABLE pgflow.step_tasks SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.05);

CREATE TYPE pgflow.step_task_record AS (
    flow_slug text,
    run_id uuid,
    step_slug text,
    input jsonb,
    msg_id bigint,
    task_index integer,
    flow_input jsonb,
    -- Ours, after what the original has.
    start_number bigint
);

-- The queues that were made for flows, and the table that each had then. Another one now, or none, means that somebody dropped it, and that
-- the messages of its tasks are gone.
CREATE TABLE pgflow.queues (
    queue text PRIMARY KEY,
    relation oid NOT NULL
);

-- One row. An operator may change it.
CREATE TABLE pgflow.limits (
    one_row boolean PRIMARY KEY DEFAULT true CHECK (one_row),
    -- Of an input or an output, as Postgres holds it.
    max_payload_bytes integer NOT NULL DEFAULT 1048576 CHECK (max_payload_bytes > 0),
    -- Of one map.
    max_map_tasks integer NOT NULL DEFAULT 100000 CHECK (max_map_tasks > 0),
    -- Of all outputs of a run together: a map gathers those of its tasks, and a run those of its last steps. Postgres ends at 256 MiB in one value.
    max_run_output_bytes bigint NOT NULL DEFAULT 67108864 CHECK (max_run_output_bytes BETWEEN 1 AND 209715200)
);
INSERT INTO pgflow.limits DEFAULT VALUES;
