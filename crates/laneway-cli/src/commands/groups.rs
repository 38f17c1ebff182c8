//! `laneway explain`, `park`, `resume` and `skip`: what is asked of one message group, and done to it.
//!
//! A group lives in a pool. Whoever does not say in which means the one that holds messages of the group; if there is none, or more than one,
//! the verb says so and does nothing.

use serde_json::{Value, json};

use crate::client::{Client, Service, part};
use crate::exit::Failure;
use crate::table::{self, printable};

/// A group, as the command line names it.
#[derive(clap::Args)]
pub(crate) struct Group {
    /// The group: the `messageGroupId` of its messages
    #[arg(value_name = "GROUP")]
    group: String,
    /// The pool that it is in; where it has messages, if not given
    #[arg(long, value_name = "CODE")]
    pool: Option<String>,
    #[command(flatten)]
    service: Service,
}

/// What `laneway explain` can be told.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  laneway explain order-7                  why is the next message of order-7 not with its target?
  laneway explain order-7 --json | jq .reason")]
pub(crate) struct ExplainOptions {
    #[command(flatten)]
    group: Group,
}

/// What `laneway park` can be told.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  laneway park order-7 --why \"the warehouse moves today\"
  laneway resume order-7")]
pub(crate) struct ParkOptions {
    #[command(flatten)]
    group: Group,
    /// What others will read who ask why it waits
    #[arg(long, value_name = "TEXT", default_value = "parked from the command line")]
    why: String,
}

/// What `laneway resume` can be told.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  laneway resume order-7      a parked group goes on; one that waits for another attempt tries at once")]
pub(crate) struct ResumeOptions {
    #[command(flatten)]
    group: Group,
}

/// What `laneway skip` can be told.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  laneway skip order-7               its next message becomes a dead letter, the others go on
  laneway dead-letters list          where it is now
  laneway dead-letters redrive 41    let it come again")]
pub(crate) struct SkipOptions {
    #[command(flatten)]
    group: Group,
}

pub(crate) fn explain(options: &ExplainOptions) -> Result<(), Failure> {
    let Group { group, pool, service } = &options.group;
    let client = service.connect()?;
    let found = match pool {
        Some(pool) => vec![look(&client, pool, group)?],
        None => standing(&client, group)?,
    };
    if service.json {
        return Ok(table::lines(&found)?);
    }
    found.iter().for_each(|view| println!("{}", sentence(view)));
    Ok(())
}

pub(crate) fn park(options: &ParkOptions) -> Result<(), Failure> {
    let done = |group: &str, pool: &str| {
        format!("{group} is parked in {pool}; `laneway resume {group}` lets it go on")
    };
    act(&options.group, "park", Some(json!({"why": options.why})), done)
}

pub(crate) fn resume(options: &ResumeOptions) -> Result<(), Failure> {
    act(&options.group, "resume", None, |group, pool| format!("{group} goes on in {pool}"))
}

pub(crate) fn skip(options: &SkipOptions) -> Result<(), Failure> {
    let done =
        |group: &str, pool: &str| format!("the next message of {group} in {pool} became a dead letter");
    act(&options.group, "skip", None, done)
}

fn act(
    asked: &Group,
    verb: &str,
    body: Option<Value>,
    done: impl Fn(&str, &str) -> String,
) -> Result<(), Failure> {
    let Group { group, pool, service } = asked;
    let client = service.connect()?;
    let pool = match pool {
        Some(pool) => pool.clone(),
        None => the_pool(&holding(&client, group)?, group)?,
    };
    let answer =
        client.post(&format!("/api/groups/{}/{}/{verb}", part(&pool), part(group)), body.as_ref())?;
    if service.json {
        let told =
            if answer.is_null() { json!({"pool": pool, "group": group, "done": verb}) } else { answer };
        return Ok(table::lines(&[told])?);
    }
    eprintln!("{}", printable(&done(group, &pool)));
    Ok(())
}

fn look(client: &Client, pool: &str, group: &str) -> Result<Value, Failure> {
    client.get(&format!("/api/groups/{}/{}", part(pool), part(group)))
}

/// How the group stands in each pool that holds messages of it; if none does, in any one, which then tells what the queues have of it.
fn standing(client: &Client, group: &str) -> Result<Vec<Value>, Failure> {
    let mut views = Vec::new();
    for pool in client.get("/api/pools")?.as_array().into_iter().flatten() {
        views.push(look(client, pool["code"].as_str().unwrap_or_default(), group)?);
    }
    match views.iter().any(holds) {
        true => views.retain(holds),
        false => views.truncate(1),
    }
    Ok(views)
}

/// A parked group is where it is parked, also if nothing of it is there.
fn holds(view: &Value) -> bool {
    view["depth"].as_u64().unwrap_or(0) > 0 || view["state"] == "parked"
}

/// How the group stands in each pool that holds messages of it.
fn holding(client: &Client, group: &str) -> Result<Vec<Value>, Failure> {
    Ok(standing(client, group)?.into_iter().filter(holds).collect())
}

/// The one pool that is meant.
fn the_pool(views: &[Value], group: &str) -> Result<String, Failure> {
    let codes: Vec<&str> = views.iter().filter_map(|view| view["pool"].as_str()).collect();
    match codes[..] {
        [one] => Ok(one.to_owned()),
        [] => Err(Failure::Refused(format!("no pool holds a message of {group:?}"))),
        _ => Err(Failure::Refused(format!(
            "{group:?} has messages in {}; say which is meant with --pool",
            codes.join(", ")
        ))),
    }
}

/// `order-7 in orders: 3 messages; in retry ...`
fn sentence(view: &Value) -> String {
    let text = |name: &str| printable(view[name].as_str().unwrap_or_default());
    if holds(view) {
        let depth = table::count(view["depth"].as_u64().unwrap_or(0), "message");
        return format!("{} in {}: {depth}; {}", text("group"), text("pool"), because(view));
    }
    let queues: Vec<String> = view["queues"].as_array().into_iter().flatten().map(in_queue).collect();
    match queues[..] {
        [] => format!("{}: no message of this group is waiting anywhere", text("group")),
        _ => format!("{}: in no pool yet; {}", text("group"), queues.join("; ")),
    }
}

/// Why its head is where it is, in the words of this program; the service's own where it says something new.
fn because(view: &Value) -> String {
    let reason = &view["reason"];
    let time = |name: &str| seconds(reason[name].as_u64().unwrap_or(0));
    let why = reason["why"].as_str().map_or_else(String::new, |why| format!(": {}", printable(why)));
    match view["state"].as_str().unwrap_or_default() {
        "running" => format!("the first of them has been with its target for {}", time("sinceMillis")),
        "retrying" => {
            let failed = table::count(reason["failedAttempts"].as_u64().unwrap_or(0), "failed attempt");
            format!("in retry, tried again in {} after {failed}{why}", time("afterMillis"))
        }
        "rateLimited" => format!("its rate lets it start in {}", time("afterMillis")),
        "parked" => format!("parked for {}{why}", time("sinceMillis")),
        "poolPaused" => "its pool is paused".to_owned(),
        "noSlotFree" => {
            let busy: Vec<_> =
                reason["busyWith"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
            let ready = table::count(reason["readyGroups"].as_u64().unwrap_or(0), "group");
            format!(
                "no slot of its pool is free, {ready} could run; busy with {}",
                printable(&busy.join(", "))
            )
        }
        _ => printable(view["explanation"].as_str().unwrap_or_default()),
    }
}

fn seconds(millis: u64) -> String {
    if millis < 1_000 { format!("{millis} ms") } else { format!("{:.1} s", millis as f64 / 1e3) }
}

/// What a queue has of a group that is in no pool.
fn in_queue(view: &Value) -> String {
    let depth = table::count(view["depth"].as_u64().unwrap_or(0), "message");
    let name = printable(view["queue"].as_str().unwrap_or_default());
    match view["delayedForMillis"].as_u64() {
        Some(millis) => {
            format!("{depth} in the queue {name}, delayed for another {:.1} s", millis as f64 / 1e3)
        }
        None => {
            format!("{depth} in the queue {name}, {}", printable(view["state"].as_str().unwrap_or_default()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_meant_where_it_has_messages_and_nowhere_else() {
        let views = [json!({"pool": "orders"}), json!({"pool": "mail"})];
        assert_eq!(the_pool(&views[..1], "g").expect("one"), "orders");
        assert!(matches!(the_pool(&[], "g"), Err(Failure::Refused(_))));
        let Err(Failure::Refused(words)) = the_pool(&views, "g") else { panic!("two are ambiguous") };
        assert!(words.contains("orders, mail") && words.contains("--pool"), "{words}");
    }

    #[test]
    fn the_explanation_is_a_sentence() {
        let view = |state: &str, reason: Value| json!({"pool": "orders", "group": "order-7", "depth": 3, "state": state, "reason": reason, "explanation": "as it is"});
        let parked = view("parked", json!({"sinceMillis": 2_000, "why": "rest"}));
        assert_eq!(sentence(&parked), "order-7 in orders: 3 messages; parked for 2.0 s: rest");
        let retrying =
            view("retrying", json!({"afterMillis": 966, "failedAttempts": 1, "why": "status 500"}));
        let words = "order-7 in orders: 3 messages; in retry, tried again in 966 ms after 1 failed attempt: status 500";
        assert_eq!(sentence(&retrying), words);
        assert_eq!(sentence(&view("moving", json!({}))), "order-7 in orders: 3 messages; as it is");
    }

    #[test]
    fn a_group_that_is_in_no_pool_may_be_in_a_queue() {
        let mut view = json!({"pool": "orders", "group": "order-7", "depth": 0, "queues": []});
        assert_eq!(sentence(&view), "order-7: no message of this group is waiting anywhere");
        view["queues"] =
            json!([{"queue": "default", "depth": 2, "state": "delayed", "delayedForMillis": 1500}]);
        assert_eq!(
            sentence(&view),
            "order-7: in no pool yet; 2 messages in the queue default, delayed for another 1.5 s"
        );
    }
}
