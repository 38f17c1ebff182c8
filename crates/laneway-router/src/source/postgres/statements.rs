//! The statements of one queue, with the names of its tables in them.
//!
//! Made once per queue by `mod.rs`, which runs them with parameters and makes deliveries and answers of their rows. Each is one statement, and so
//! one transaction: it happens whole, or not at all.

/// What pgmq calls the group of all messages that have none.
pub(super) const UNGROUPED: &str = "_default_fifo_group";

/// The group of a row, as it is indexed. Bytes are compared, whatever language the database is set to.
const GROUP: &str =
    r#"(coalesce(nullif(q.headers ->> 'x-pgmq-group', ''), '_default_fifo_group') COLLATE "C")"#;

/// When a row was last handed out, in microseconds. With the number of the row and how often it was handed out, this makes a receipt: unlike those
/// two alone, it never comes again, not even in a queue that was dropped and made anew.
const READ_AT: &str = "(extract(epoch FROM q.last_read_at) * 1000000)::bigint";

/// The statements of one queue.
pub(super) struct Statements {
    /// (behind this group, at most so many, lease in seconds, but not this group) → claimed rows
    pub(super) claim_heads: String,
    /// (at most so many, lease in seconds) → claimed rows
    pub(super) claim_loose: String,
    /// → seconds until the next row that is hidden now may be seen
    pub(super) next_due: String,
    /// (numbers, counts, times, kinds, delays in seconds, reasons, queue) → (number, count) of those that were settled
    pub(super) settle: String,
    /// (numbers, counts, times, lease in seconds) → (number, count) of those that were extended
    pub(super) extend: String,
    /// (queue, most that are counted one by one) → all, leased, dead, quarantined
    pub(super) depth: String,
}

/// What `settle` is told about a row.
pub(super) mod kinds {
    pub(in super::super) const DONE: i16 = 0;
    pub(in super::super) const GIVE_BACK: i16 = 1;
    pub(in super::super) const DEAD: i16 = 2;
    pub(in super::super) const QUARANTINE: i16 = 3;
}

impl Statements {
    /// `queue` is a name that needs no quotes.
    pub(super) fn of(queue: &str, text_chars_max: usize) -> Self {
        let table = table(queue);
        let lease = format!(
            "UPDATE {table} q
             SET vt = clock_timestamp() + make_interval(secs => $LEASE), read_ct = q.read_ct + 1, last_read_at = clock_timestamp()
             FROM picked WHERE q.msg_id = picked.msg_id
             RETURNING q.msg_id, q.read_ct, {READ_AT}, {GROUP}, q.headers ->> 'x-laneway-text',
                 left(CASE WHEN q.headers ? 'x-laneway-text' THEN q.message #>> '{{}}' ELSE q.message::text END, {text_chars_max})"
        );
        Statements {
            claim_heads: claim_heads(&table, &lease.replace("$LEASE", "$3")),
            claim_loose: format!(
                "WITH picked AS MATERIALIZED (
                     SELECT q.msg_id FROM {table} q WHERE {GROUP} = '{UNGROUPED}' AND q.vt <= clock_timestamp()
                     ORDER BY {GROUP}, q.msg_id LIMIT $1 FOR UPDATE SKIP LOCKED)
                 {}",
                lease.replace("$LEASE", "$2")
            ),
            next_due: format!(
                "SELECT extract(epoch FROM min(q.vt) - clock_timestamp())::float8 FROM {table} q WHERE q.vt > clock_timestamp()"
            ),
            settle: settle(&table),
            extend: format!(
                "UPDATE {table} q SET vt = clock_timestamp() + make_interval(secs => $4)
                 FROM unnest($1::bigint[], $2::integer[], $3::bigint[]) AS asked(msg_id, read_ct, read_at)
                 WHERE {}
                 RETURNING q.msg_id, q.read_ct",
                same_delivery()
            ),
            depth: depth(&table),
        }
    }
}

/// The table of a queue.
pub(super) fn table(queue: &str) -> String {
    format!("pgmq.q_{queue}")
}

/// What lets the first row of each group be found without looking at the others.
pub(super) fn index(queue: &str) -> String {
    format!(
        "CREATE INDEX IF NOT EXISTS q_{queue}_laneway ON {} ({}, msg_id)",
        table(queue),
        GROUP.replace("q.", "")
    )
}

/// Whether a row was handed out with the receipt that is asked about, and not again since.
fn same_delivery() -> String {
    format!("q.msg_id = asked.msg_id AND q.read_ct = asked.read_ct AND {READ_AT} = asked.read_at")
}

/// Goes from group to group along the index, and takes the first row of each if it is free. The cost is by the groups passed, not by the rows
/// that wait in them, and it ends as soon as there are enough. pgmq's own `read_grouped_head` sees the same rows in the same way, but reads the
/// whole queue each time.
///
/// The first row of a group is found with the statement's snapshot and looked at again when it is locked: whoever was quicker has moved its time,
/// or it is gone, and then it is passed over, and nobody gets the one behind it.
fn claim_heads(table: &str, lease: &str) -> String {
    format!(
        "WITH RECURSIVE heads(name, msg_id) AS (
             (SELECT {GROUP}, q.msg_id FROM {table} q WHERE {GROUP} > $1 ORDER BY {GROUP}, q.msg_id LIMIT 1)
             UNION ALL
             SELECT next.name, next.msg_id FROM heads, LATERAL (
                 SELECT {GROUP} AS name, q.msg_id FROM {table} q WHERE {GROUP} > heads.name
                 ORDER BY {GROUP}, q.msg_id LIMIT 1) AS next),
         picked AS MATERIALIZED (
             SELECT free.msg_id FROM heads, LATERAL (
                 SELECT q.msg_id FROM {table} q WHERE q.msg_id = heads.msg_id AND q.vt <= clock_timestamp()
                 FOR UPDATE SKIP LOCKED) AS free
             WHERE heads.name <> $4 LIMIT $2)
         {lease}"
    )
}

fn settle(table: &str) -> String {
    let same = same_delivery();
    let (back, dead) = (kinds::GIVE_BACK, kinds::DEAD);
    format!(
        "WITH asked AS MATERIALIZED (
             SELECT * FROM unnest($1::bigint[], $2::integer[], $3::bigint[], $4::smallint[], $5::float8[], $6::text[])
                 AS it(msg_id, read_ct, read_at, kind, delay, reason)),
         gone AS (
             DELETE FROM {table} q USING asked WHERE asked.kind <> {back} AND {same}
             RETURNING q.msg_id, q.read_ct, q.enqueued_at, q.message, q.headers, asked.kind, asked.reason),
         kept AS (
             INSERT INTO laneway_queue.kept (queue, kind, msg_id, read_ct, enqueued_at, reason, message, headers)
             SELECT $7, CASE kind WHEN {dead} THEN 'dead' ELSE 'quarantine' END, msg_id, read_ct, enqueued_at, reason, message, headers
             FROM gone WHERE kind >= {dead} ORDER BY msg_id),
         back AS (
             UPDATE {table} q SET vt = clock_timestamp() + make_interval(secs => asked.delay), last_read_at = NULL
             FROM asked WHERE asked.kind = {back} AND {same}
             RETURNING q.msg_id, q.read_ct)
         SELECT msg_id, read_ct FROM gone UNION ALL SELECT msg_id, read_ct FROM back"
    )
}

/// Counts one by one only up to a limit; beyond it the server's own estimate is good enough, and costs nothing.
fn depth(table: &str) -> String {
    format!(
        "SELECT
             CASE WHEN counted.total <= $2 THEN counted.total
                  ELSE greatest(counted.total, (SELECT reltuples::bigint FROM pg_class WHERE oid = '{table}'::regclass)) END,
             counted.leased,
             (SELECT count(*) FROM laneway_queue.kept WHERE queue = $1 AND kind = 'dead'),
             (SELECT count(*) FROM laneway_queue.kept WHERE queue = $1 AND kind = 'quarantine')
         FROM (SELECT
             (SELECT count(*) FROM (SELECT 1 FROM {table} LIMIT $2 + 1) AS rows_there) AS total,
             (SELECT count(*) FROM (
                 SELECT 1 FROM {table} q WHERE q.vt > clock_timestamp() AND q.last_read_at IS NOT NULL LIMIT $2 + 1) AS rows_there) AS leased
         ) AS counted"
    )
}
