-- Definitions: flows, their steps, and the comparison of what a program means with what the database has.

CREATE FUNCTION pgflow._require_flow(p_flow_slug text) RETURNS pgflow.flows
LANGUAGE plpgsql STABLE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_flow pgflow.flows;
BEGIN
    SELECT * INTO v_flow FROM pgflow.flows f WHERE f.flow_slug = p_flow_slug;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no flow %', coalesce(quote_literal(left(p_flow_slug, 200)), 'NULL')
            USING ERRCODE = 'PF002',
                  HINT = coalesce('There are: ' || (SELECT string_agg(x.flow_slug, ', ') FROM
                      (SELECT f.flow_slug FROM pgflow.flows f ORDER BY 1 LIMIT 20) x), 'There are no flows yet.');
    END IF;
    RETURN v_flow;
END
$$;

-- Refuses a second definition that is not the first one. Arguments that were not given are not compared.
CREATE FUNCTION pgflow._require_same(p_what text, p_column text, p_old jsonb, p_new jsonb) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    IF p_new IS NOT NULL AND p_new <> 'null' AND p_new IS DISTINCT FROM p_old THEN
        RAISE EXCEPTION '% exists with % %, not %', p_what, p_column, coalesce(p_old, 'null'), p_new
            USING ERRCODE = 'PF005', HINT = 'pgflow.ensure_flow_compiled changes what may be changed.';
    END IF;
END
$$;

CREATE FUNCTION pgflow.create_flow(
    flow_slug text,
    max_attempts integer DEFAULT NULL,
    base_delay integer DEFAULT NULL,
    timeout integer DEFAULT NULL,
    queue text DEFAULT NULL,
    key_path text[] DEFAULT NULL
) RETURNS pgflow.flows
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_flow pgflow.flows;
    v_queue text := pgflow._queue_name(create_flow.queue);
    v_what text := 'the flow ' || quote_literal(create_flow.flow_slug);
BEGIN
    PERFORM pgflow._require_slug('flow', create_flow.flow_slug);
    IF v_queue IS NULL AND length(create_flow.flow_slug) > 47 THEN
        RAISE EXCEPTION '% would be the name of its queue, which may have 47 characters', v_what
            USING ERRCODE = 'PF001', HINT = 'Give the flow a queue.';
    END IF;
    IF v_queue IS NULL AND lower(create_flow.flow_slug) = 'false' THEN
        RAISE EXCEPTION '% needs a queue: false is no name for one', v_what USING ERRCODE = 'PF001';
    END IF;
    IF cardinality(create_flow.key_path) = 0 OR array_position(create_flow.key_path, NULL) IS NOT NULL THEN
        RAISE EXCEPTION 'the path to the key of % is empty or has a hole', v_what USING ERRCODE = 'PF001';
    END IF;

    INSERT INTO pgflow.flows AS f (flow_slug, opt_max_attempts, opt_base_delay, opt_timeout, queue, key_path)
    VALUES (create_flow.flow_slug, coalesce(max_attempts, 3), coalesce(base_delay, 5), coalesce(timeout, 60), v_queue, create_flow.key_path)
    ON CONFLICT (flow_slug) DO NOTHING
    RETURNING * INTO v_flow;
    IF NOT FOUND THEN
        SELECT * INTO STRICT v_flow FROM pgflow.flows f WHERE f.flow_slug = create_flow.flow_slug;
        PERFORM pgflow._require_same(v_what, 'max_attempts', to_jsonb(v_flow.opt_max_attempts), to_jsonb(max_attempts));
        PERFORM pgflow._require_same(v_what, 'base_delay', to_jsonb(v_flow.opt_base_delay), to_jsonb(base_delay));
        PERFORM pgflow._require_same(v_what, 'timeout', to_jsonb(v_flow.opt_timeout), to_jsonb(timeout));
        PERFORM pgflow._require_same(v_what, 'queue', to_jsonb(v_flow.queue), to_jsonb(v_queue));
        PERFORM pgflow._require_same(v_what, 'key_path', to_jsonb(v_flow.key_path), to_jsonb(create_flow.key_path));
    END IF;
    PERFORM pgflow._ensure_queue(pgflow._resolve_queue(NULL, v_flow.queue, v_flow.flow_slug));
    RETURN v_flow;
END
$$;

CREATE FUNCTION pgflow.add_step(
    flow_slug text,
    step_slug text,
    deps_slugs text[] DEFAULT '{}',
    max_attempts integer DEFAULT NULL,
    base_delay integer DEFAULT NULL,
    timeout integer DEFAULT NULL,
    start_delay integer DEFAULT NULL,
    step_type text DEFAULT 'single',
    required_input_pattern jsonb DEFAULT NULL,
    forbidden_input_pattern jsonb DEFAULT NULL,
    when_unmet text DEFAULT 'skip',
    when_exhausted text DEFAULT 'fail',
    queue text DEFAULT NULL
) RETURNS pgflow.steps
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_flow pgflow.flows;
    v_step pgflow.steps;
    v_deps text[] := coalesce(add_step.deps_slugs, '{}');
    v_known text[];
    v_queue text := pgflow._queue_name(add_step.queue);
    v_target text;
    v_what text := format('the step %L of the flow %L', add_step.step_slug, add_step.flow_slug);
BEGIN
    v_flow := pgflow._require_flow(add_step.flow_slug);
    PERFORM pgflow._require_slug('step', add_step.step_slug);
    -- One at a time, so that each gets the next index.
    PERFORM pg_advisory_xact_lock(hashtextextended('pgflow.define:' || add_step.flow_slug, 0));

    v_target := pgflow._resolve_queue(v_queue, v_flow.queue, v_flow.flow_slug);
    IF add_step.step_slug = ANY (v_deps) THEN
        RAISE EXCEPTION '% depends on itself', v_what USING ERRCODE = 'PF005';
    END IF;
    IF (SELECT count(DISTINCT d) FROM unnest(v_deps) d) <> cardinality(v_deps) THEN
        RAISE EXCEPTION '% names a dependency twice or not at all: %', v_what, v_deps USING ERRCODE = 'PF005';
    END IF;
    SELECT coalesce(array_agg(s.step_slug ORDER BY s.step_index), '{}') INTO v_known
    FROM pgflow.steps s WHERE s.flow_slug = add_step.flow_slug;
    IF NOT v_deps <@ v_known THEN
        RAISE EXCEPTION '% depends on %, which the flow does not have', v_what,
            (SELECT string_agg(quote_literal(d), ', ') FROM unnest(v_deps) d WHERE d <> ALL (v_known))
            USING ERRCODE = 'PF005', HINT = CASE cardinality(v_known) WHEN 0 THEN 'It has no steps yet.'
                ELSE 'It has: ' || array_to_string(v_known, ', ') END;
    END IF;
    IF add_step.step_type NOT IN ('single', 'map') THEN
        RAISE EXCEPTION '% has the type %, which is neither single nor map', v_what, quote_literal(add_step.step_type)
            USING ERRCODE = 'PF001';
    END IF;
    IF add_step.step_type = 'map' AND cardinality(v_deps) > 1 THEN
        RAISE EXCEPTION '% is a map and has % dependencies: a map has one array to work on', v_what, cardinality(v_deps)
            USING ERRCODE = 'PF005';
    END IF;
    IF v_target IS NULL AND num_nonnulls(max_attempts, base_delay, timeout, start_delay) > 0 THEN
        RAISE EXCEPTION '% is completed by hand: attempts, delays and a timeout mean nothing for it', v_what
            USING ERRCODE = 'PF001';
    END IF;

    SELECT * INTO v_step FROM pgflow.steps s WHERE s.flow_slug = add_step.flow_slug AND s.step_slug = add_step.step_slug;
    IF FOUND THEN
        PERFORM pgflow._require_same(v_what, 'step_type', to_jsonb(v_step.step_type), to_jsonb(add_step.step_type));
        PERFORM pgflow._require_same(v_what, 'deps_slugs',
            (SELECT coalesce(jsonb_agg(d.dep_slug ORDER BY d.dep_slug), '[]') FROM pgflow.deps d
             WHERE d.flow_slug = add_step.flow_slug AND d.step_slug = add_step.step_slug),
            (SELECT coalesce(jsonb_agg(d ORDER BY d), '[]') FROM unnest(v_deps) d));
        PERFORM pgflow._require_same(v_what, 'max_attempts', to_jsonb(v_step.opt_max_attempts), to_jsonb(max_attempts));
        PERFORM pgflow._require_same(v_what, 'base_delay', to_jsonb(v_step.opt_base_delay), to_jsonb(base_delay));
        PERFORM pgflow._require_same(v_what, 'timeout', to_jsonb(v_step.opt_timeout), to_jsonb(timeout));
        PERFORM pgflow._require_same(v_what, 'start_delay', to_jsonb(v_step.opt_start_delay), to_jsonb(start_delay));
        PERFORM pgflow._require_same(v_what, 'queue', to_jsonb(v_step.queue), to_jsonb(v_queue));
    ELSE
        INSERT INTO pgflow.steps AS s (flow_slug, step_slug, step_type, step_index, deps_count, opt_max_attempts, opt_base_delay,
            opt_timeout, opt_start_delay, required_input_pattern, forbidden_input_pattern, when_unmet, when_exhausted, queue)
        VALUES (add_step.flow_slug, add_step.step_slug, add_step.step_type, cardinality(v_known), cardinality(v_deps),
            max_attempts, base_delay, timeout, start_delay, add_step.required_input_pattern,
            add_step.forbidden_input_pattern, add_step.when_unmet, add_step.when_exhausted, v_queue)
        RETURNING * INTO v_step;
        INSERT INTO pgflow.deps (flow_slug, dep_slug, step_slug)
        SELECT add_step.flow_slug, d, add_step.step_slug FROM unnest(v_deps) d;
    END IF;
    PERFORM pgflow._ensure_queue(v_target);
    RETURN v_step;
END
$$;

-- add_step(flow, step, 'single', '{}', 'queue'), as in the tests of the document. All parameters are text: literals without a type
-- then mean this one. So does add_step(flow, step, '{dep}', '3', '5') of the older form, which is handed on.
CREATE FUNCTION pgflow.add_step(flow_slug text, step_slug text, step_type text, deps_slugs text, queue text) RETURNS pgflow.steps
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    IF add_step.step_type LIKE '{%' THEN
        RETURN pgflow.add_step(add_step.flow_slug, add_step.step_slug, add_step.step_type::text[],
            max_attempts => add_step.deps_slugs::integer, base_delay => add_step.queue::integer);
    END IF;
    RETURN pgflow.add_step(add_step.flow_slug, add_step.step_slug, add_step.deps_slugs::text[],
        step_type => coalesce(add_step.step_type, 'single'), queue => add_step.queue);
END
$$;

-- The queues that a flow's tasks go to.
CREATE FUNCTION pgflow.flow_queues(flow_slug text) RETURNS SETOF text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_flow pgflow.flows := pgflow._require_flow(flow_queues.flow_slug);
BEGIN
    RETURN QUERY
    SELECT x.queue FROM (
        SELECT pgflow._resolve_queue(NULL, v_flow.queue, v_flow.flow_slug) AS queue, -1 AS place
        UNION ALL
        SELECT pgflow._resolve_queue(s.queue, v_flow.queue, v_flow.flow_slug), s.step_index
        FROM pgflow.steps s WHERE s.flow_slug = v_flow.flow_slug) x
    WHERE x.queue IS NOT NULL
    GROUP BY x.queue ORDER BY min(x.place);
END
$$;

-- A pattern in a shape says whether there is one, since JSON's null could be meant as a value.
CREATE FUNCTION pgflow._pattern(p_pattern jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE SET search_path TO pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN p_pattern IS NULL THEN '{"defined": false}' ELSE jsonb_build_object('defined', true, 'value', p_pattern) END
$$;

CREATE FUNCTION pgflow._get_flow_shape(p_flow_slug text) RETURNS jsonb
LANGUAGE sql STABLE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object(
        'queue', f.queue,
        'keyPath', to_jsonb(f.key_path),
        'options', jsonb_build_object('maxAttempts', f.opt_max_attempts, 'baseDelay', f.opt_base_delay, 'timeout', f.opt_timeout),
        'steps', coalesce((
            SELECT jsonb_agg(jsonb_build_object(
                'slug', s.step_slug,
                'stepType', s.step_type,
                'dependencies', (SELECT coalesce(jsonb_agg(d.dep_slug ORDER BY d.dep_slug), '[]') FROM pgflow.deps d
                                 WHERE d.flow_slug = s.flow_slug AND d.step_slug = s.step_slug),
                'queue', s.queue,
                'whenUnmet', s.when_unmet,
                'whenExhausted', s.when_exhausted,
                'requiredInputPattern', pgflow._pattern(s.required_input_pattern),
                'forbiddenInputPattern', pgflow._pattern(s.forbidden_input_pattern),
                'options', jsonb_build_object('maxAttempts', s.opt_max_attempts, 'baseDelay', s.opt_base_delay,
                    'timeout', s.opt_timeout, 'startDelay', s.opt_start_delay)) ORDER BY s.step_index)
            FROM pgflow.steps s WHERE s.flow_slug = f.flow_slug), '[]'))
    FROM pgflow.flows f WHERE f.flow_slug = p_flow_slug
$$;

-- A shape with every key that it may have, checked: names, types, no step twice, no unknown dependency, no cycle. Steps come out in an
-- order in which each follows what it depends on.
CREATE FUNCTION pgflow._normalize_shape(p_shape jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_step jsonb;
    v_steps jsonb[] := '{}';
    v_slugs text[] := '{}';
    v_waiting jsonb[];
    v_left jsonb[];
    v_deps jsonb;
    v_options jsonb := coalesce(nullif(p_shape -> 'options', 'null'), '{}');
BEGIN
    IF jsonb_typeof(p_shape) IS DISTINCT FROM 'object' OR jsonb_typeof(p_shape -> 'steps') IS DISTINCT FROM 'array' THEN
        RAISE EXCEPTION 'a shape is an object with an array of steps' USING ERRCODE = 'PF005';
    END IF;
    FOR v_step IN SELECT s FROM jsonb_array_elements(p_shape -> 'steps') s LOOP
        PERFORM pgflow._require_slug('step', v_step ->> 'slug');
        IF v_step ->> 'slug' = ANY (v_slugs) THEN
            RAISE EXCEPTION 'the step % is there twice', quote_literal(v_step ->> 'slug') USING ERRCODE = 'PF005';
        END IF;
        v_slugs := v_slugs || (v_step ->> 'slug');
        v_deps := coalesce(nullif(v_step -> 'dependencies', 'null'), '[]');
        IF jsonb_typeof(v_deps) <> 'array' THEN
            RAISE EXCEPTION 'the dependencies of the step % are no array', quote_literal(v_step ->> 'slug') USING ERRCODE = 'PF005';
        END IF;
        v_waiting := v_waiting || jsonb_build_object(
            'slug', v_step ->> 'slug',
            'stepType', coalesce(v_step ->> 'stepType', 'single'),
            'dependencies', (SELECT coalesce(jsonb_agg(d ORDER BY d), '[]') FROM jsonb_array_elements_text(v_deps) d),
            'queue', pgflow._queue_name(v_step ->> 'queue'),
            'whenUnmet', coalesce(v_step ->> 'whenUnmet', 'skip'),
            'whenExhausted', coalesce(v_step ->> 'whenExhausted', 'fail'),
            'requiredInputPattern', CASE WHEN (v_step -> 'requiredInputPattern' ->> 'defined')::boolean
                THEN pgflow._pattern(v_step -> 'requiredInputPattern' -> 'value') ELSE pgflow._pattern(NULL) END,
            'forbiddenInputPattern', CASE WHEN (v_step -> 'forbiddenInputPattern' ->> 'defined')::boolean
                THEN pgflow._pattern(v_step -> 'forbiddenInputPattern' -> 'value') ELSE pgflow._pattern(NULL) END,
            'options', jsonb_build_object(
                'maxAttempts', v_step -> 'options' -> 'maxAttempts', 'baseDelay', v_step -> 'options' -> 'baseDelay',
                'timeout', v_step -> 'options' -> 'timeout', 'startDelay', v_step -> 'options' -> 'startDelay'));
    END LOOP;

    FOREACH v_step IN ARRAY coalesce(v_waiting, '{}') LOOP
        IF EXISTS (SELECT FROM jsonb_array_elements_text(v_step -> 'dependencies') d WHERE d <> ALL (v_slugs)) THEN
            RAISE EXCEPTION 'the step % depends on %, which the flow does not have', quote_literal(v_step ->> 'slug'),
                (SELECT string_agg(quote_literal(d), ', ') FROM jsonb_array_elements_text(v_step -> 'dependencies') d WHERE d <> ALL (v_slugs))
                USING ERRCODE = 'PF005', HINT = 'It has: ' || array_to_string(v_slugs, ', ');
        END IF;
    END LOOP;

    v_slugs := '{}';
    WHILE cardinality(v_waiting) > 0 LOOP
        v_left := '{}';
        FOREACH v_step IN ARRAY v_waiting LOOP
            IF EXISTS (SELECT FROM jsonb_array_elements_text(v_step -> 'dependencies') d WHERE d <> ALL (v_slugs)) THEN
                v_left := v_left || v_step;
            ELSE
                v_steps := v_steps || v_step;
                v_slugs := v_slugs || (v_step ->> 'slug');
            END IF;
        END LOOP;
        IF cardinality(v_left) = cardinality(v_waiting) THEN
            RAISE EXCEPTION 'these steps wait for each other, or for such steps: %',
                (SELECT string_agg(s ->> 'slug', ', ') FROM unnest(v_left) s) USING ERRCODE = 'PF005';
        END IF;
        v_waiting := v_left;
    END LOOP;

    RETURN jsonb_build_object(
        'queue', pgflow._queue_name(p_shape ->> 'queue'),
        'keyPath', coalesce(p_shape -> 'keyPath', 'null'),
        'options', jsonb_build_object(
            'maxAttempts', coalesce(nullif(v_options -> 'maxAttempts', 'null'), '3'),
            'baseDelay', coalesce(nullif(v_options -> 'baseDelay', 'null'), '5'),
            'timeout', coalesce(nullif(v_options -> 'timeout', 'null'), '60')),
        'steps', to_jsonb(v_steps));
END
$$;

-- What differs between two normalized shapes. `structural` differences would change runs that are under way; others may be applied.
CREATE FUNCTION pgflow._shape_differences(p_local jsonb, p_db jsonb, OUT structural text[], OUT other text[])
LANGUAGE plpgsql IMMUTABLE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_key text;
    v_slug text;
    v_mine jsonb;
    v_theirs jsonb;
BEGIN
    structural := '{}';
    other := '{}';
    IF p_local -> 'keyPath' IS DISTINCT FROM p_db -> 'keyPath' THEN
        structural := structural || format('the path to the key is %s, in the database %s', p_local -> 'keyPath', p_db -> 'keyPath');
    END IF;
    IF p_local -> 'queue' IS DISTINCT FROM p_db -> 'queue' THEN
        other := other || format('the queue is %s, in the database %s', p_local -> 'queue', p_db -> 'queue');
    END IF;
    FOR v_key IN SELECT jsonb_object_keys(p_local -> 'options') LOOP
        IF p_local -> 'options' -> v_key IS DISTINCT FROM p_db -> 'options' -> v_key THEN
            other := other || format('%s is %s, in the database %s', v_key, p_local -> 'options' -> v_key, p_db -> 'options' -> v_key);
        END IF;
    END LOOP;
    FOR v_slug, v_mine, v_theirs IN
        SELECT coalesce(l ->> 'slug', d ->> 'slug'), l, d
        FROM jsonb_array_elements(p_local -> 'steps') l
        FULL JOIN jsonb_array_elements(p_db -> 'steps') d ON l ->> 'slug' = d ->> 'slug'
        ORDER BY 1
    LOOP
        IF v_mine IS NULL THEN
            structural := structural || format('the step %L is only in the database', v_slug);
        ELSIF v_theirs IS NULL THEN
            other := other || format('the step %L is new', v_slug);
        ELSE
            FOREACH v_key IN ARRAY ARRAY['stepType', 'dependencies'] LOOP
                IF v_mine -> v_key IS DISTINCT FROM v_theirs -> v_key THEN
                    structural := structural || format('the step %L: %s is %s, in the database %s', v_slug, v_key, v_mine -> v_key, v_theirs -> v_key);
                END IF;
            END LOOP;
            FOREACH v_key IN ARRAY ARRAY['queue', 'whenUnmet', 'whenExhausted', 'requiredInputPattern', 'forbiddenInputPattern', 'options'] LOOP
                IF v_mine -> v_key IS DISTINCT FROM v_theirs -> v_key THEN
                    other := other || format('the step %L: %s is %s, in the database %s', v_slug, v_key, v_mine -> v_key, v_theirs -> v_key);
                END IF;
            END LOOP;
        END IF;
    END LOOP;
END
$$;

CREATE FUNCTION pgflow._compare_flow_shapes(p_local jsonb, p_db jsonb) RETURNS text[]
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_differences record := pgflow._shape_differences(pgflow._normalize_shape(p_local), pgflow._normalize_shape(p_db));
BEGIN
    RETURN v_differences.structural || v_differences.other;
END
$$;

-- {"verdict": missing | same | compatible | different, "differences": [text]}
CREATE FUNCTION pgflow.compare_flow_shape(flow_slug text, shape jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_local jsonb := pgflow._normalize_shape(shape);
    v_db jsonb := pgflow._get_flow_shape(flow_slug);
    v_found record;
BEGIN
    PERFORM pgflow._require_slug('flow', flow_slug);
    IF v_db IS NULL THEN
        RETURN '{"verdict": "missing", "differences": []}';
    END IF;
    v_found := pgflow._shape_differences(v_local, v_db);
    RETURN jsonb_build_object(
        'verdict', CASE WHEN cardinality(v_found.structural) > 0 THEN 'different'
                        WHEN cardinality(v_found.other) > 0 THEN 'compatible' ELSE 'same' END,
        'differences', to_jsonb(v_found.structural || v_found.other));
END
$$;

CREATE FUNCTION pgflow._text_array(p_array jsonb) RETURNS text[]
LANGUAGE sql IMMUTABLE SET search_path TO pg_catalog, pg_temp
AS $$
    SELECT CASE jsonb_typeof(p_array) WHEN 'array' THEN ARRAY(SELECT jsonb_array_elements_text(p_array)) END
$$;

-- Makes the flow, or the steps of it that are missing. The shape is normalized.
CREATE FUNCTION pgflow._create_flow_from_shape(p_flow_slug text, p_shape jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_step jsonb;
    v_shape jsonb := pgflow._normalize_shape(p_shape);
BEGIN
    PERFORM pgflow.create_flow(p_flow_slug,
        (v_shape -> 'options' ->> 'maxAttempts')::integer, (v_shape -> 'options' ->> 'baseDelay')::integer,
        (v_shape -> 'options' ->> 'timeout')::integer, v_shape ->> 'queue', pgflow._text_array(v_shape -> 'keyPath'));
    FOR v_step IN SELECT s FROM jsonb_array_elements(v_shape -> 'steps') s LOOP
        PERFORM pgflow.add_step(p_flow_slug, v_step ->> 'slug', pgflow._text_array(v_step -> 'dependencies'),
            (v_step -> 'options' ->> 'maxAttempts')::integer, (v_step -> 'options' ->> 'baseDelay')::integer,
            (v_step -> 'options' ->> 'timeout')::integer, (v_step -> 'options' ->> 'startDelay')::integer,
            v_step ->> 'stepType', v_step -> 'requiredInputPattern' -> 'value', v_step -> 'forbiddenInputPattern' -> 'value',
            v_step ->> 'whenUnmet', v_step ->> 'whenExhausted', v_step ->> 'queue');
    END LOOP;
END
$$;

-- Applies what differs without touching what runs depend on.
CREATE FUNCTION pgflow._update_flow_from_shape(p_flow_slug text, p_shape jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path TO pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE pgflow.flows f
    SET queue = p_shape ->> 'queue',
        opt_max_attempts = (p_shape -> 'options' ->> 'maxAttempts')::integer,
        opt_base_delay = (p_shape -> 'options' ->> 'baseDelay')::integer,
        opt_timeout = (p_shape -> 'options' ->> 'timeout')::integer
    WHERE f.flow_slug = p_flow_slug;
    UPDATE pgflow.steps s
    SET queue = n ->> 'queue',
        when_unmet = n ->> 'whenUnmet',
        when_exhausted = n ->> 'whenExhausted',
        required_input_pattern = n -> 'requiredInputPattern' -> 'value',
        forbidden_input_pattern = n -> 'forbiddenInputPattern' -> 'value',
        opt_max_attempts = (n -> 'options' ->> 'maxAttempts')::integer,
        opt_base_delay = (n -> 'options' ->> 'baseDelay')::integer,
        opt_timeout = (n -> 'options' ->> 'timeout')::integer,
        opt_start_delay = (n -> 'options' ->> 'startDelay')::integer
    FROM jsonb_array_elements(p_shape -> 'steps') n
    WHERE s.flow_slug = p_flow_slug AND s.step_slug = n ->> 'slug';
    PERFORM pgflow._create_flow_from_shape(p_flow_slug, p_shape);
END
$$;

-- compiled: it was not there. verified: it is the same. updated: what differed could be applied. recompiled: it was deleted with all of
-- its runs and made again. mismatch: nothing was done, and this is what differs.
CREATE FUNCTION pgflow.ensure_flow_compiled(flow_slug text, shape jsonb, allow_data_loss boolean DEFAULT false) RETURNS jsonb
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path TO pg_catalog, pg_temp
AS $$
DECLARE
    v_shape jsonb := pgflow._normalize_shape(shape);
    v_found jsonb;
    v_status text;
BEGIN
    -- Two programs that start at once compare one after the other.
    PERFORM pg_advisory_xact_lock(hashtextextended('pgflow.compile:' || flow_slug, 0));
    v_found := pgflow.compare_flow_shape(flow_slug, v_shape);
    IF v_found ->> 'verdict' IN ('same', 'compatible') THEN
        -- A queue that was dropped by hand comes back with the messages of its tasks, before anything makes it again without them.
        PERFORM pgflow.repair_queues(ARRAY(SELECT pgflow.flow_queues(flow_slug)));
    END IF;
    CASE
        WHEN v_found ->> 'verdict' = 'missing' THEN
            PERFORM pgflow._create_flow_from_shape(flow_slug, v_shape);
            v_status := 'compiled';
        WHEN v_found ->> 'verdict' = 'same' THEN
            v_status := 'verified';
        WHEN v_found ->> 'verdict' = 'compatible' THEN
            PERFORM pgflow._update_flow_from_shape(flow_slug, v_shape);
            -- What waits goes to the queues that are read from now on.
            PERFORM pgflow._reroute_flow(flow_slug);
            v_status := 'updated';
        WHEN allow_data_loss THEN
            PERFORM pgflow.delete_flow_and_data(flow_slug);
            PERFORM pgflow._create_flow_from_shape(flow_slug, v_shape);
            v_status := 'recompiled';
        ELSE
            v_status := 'mismatch';
    END CASE;
    RETURN jsonb_build_object('status', v_status, 'differences', v_found -> 'differences');
END
$$;
