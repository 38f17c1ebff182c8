//! The verbs that speak to a service, against a real one: what they do, what they print, and how they fail.

use std::io::Read;

use crate::running::{Running, run};
use serde_json::{Value, json};

#[test]
fn what_is_sent_is_delivered() {
    let service = Running::start(&[]);
    let target = format!("{}/api/test/success", service.url);
    let sent =
        service.tell(&["send", "--group", "order-7", "--target", &target, "--count", "3", "--id", "m"]);
    let ids: Vec<&Value> = sent.iter().map(|message| &message["id"]).collect();
    assert_eq!(ids, ["m-1", "m-2", "m-3"]);
    let sequences: Vec<u64> = sent.iter().filter_map(|message| message["sequence"].as_u64()).collect();
    assert!(sequences.is_sorted() && sequences.len() == 3, "{sent:?}");
    service.delivered("DEFAULT-POOL", 3);
    let answer = service.ask(&["send", "--payload", "{\"state\": \"paid\"}"]);
    assert_eq!(answer.code, 0, "{}", answer.stderr);
    assert!(answer.stderr.contains("accepted cli-") && answer.stdout.is_empty(), "{}", answer.stderr);
    service.delivered("DEFAULT-POOL", 4);
}

#[test]
fn payloads_come_from_files_and_pipes_and_must_be_json() {
    let service = Running::start(&[]);
    let file = service.folder.path().join("order.json");
    std::fs::write(&file, "{\"state\": \"paid\"}\n").expect("written");
    let file = format!("@{}", file.display());
    assert_eq!(service.ask(&["send", "--payload", &file]).code, 0);
    assert_eq!(service.ask_with("[1, 2]", &["send", "--payload", "-"]).code, 0);
    service.delivered("DEFAULT-POOL", 2);
    let answer = service.ask(&["send", "--payload", "{state: paid}"]);
    assert_eq!(answer.code, 2, "{}", answer.stderr);
    assert!(answer.stderr.contains("is not JSON"), "{}", answer.stderr);
    assert_eq!(service.ask(&["send", "--payload", "@no-such-file"]).code, 1);
}

#[test]
fn everything_that_a_message_can_say_has_an_option() {
    let service = Running::start(&[]);
    let file = service.folder.path().join("token");
    std::fs::write(&file, "hush-7\n").expect("written");
    let file = file.display().to_string();
    let refusing = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let target = format!("http://{}/", refusing.local_addr().expect("an address"));
    let send = [
        "send",
        "--group",
        "g",
        "--id",
        "m",
        "--target",
        &target,
        "--auth-token-file",
        &file,
        "--header",
        "tenant=a=b",
        "--header",
        "colour=",
        "--priority",
        "high",
        "--dispatch-mode",
        "block_on_error",
        "--deduplication-id",
        "d",
        "--count",
        "2",
    ];
    let accepted = service.tell(&send);
    assert_eq!(accepted.len(), 2, "their ids are numbered, those of deduplication too: {accepted:?}");
    let again = service.tell(&send);
    assert!(again.iter().all(|message| message["duplicate"] == true), "{again:?}");
    // What the target is asked.
    let (mut call, _) = refusing.accept().expect("a call");
    let mut asked = Vec::new();
    while !asked.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        call.read_exact(&mut byte).expect("the head of a request");
        asked.push(byte[0]);
    }
    let asked = String::from_utf8(asked).expect("text").to_lowercase();
    for header in ["authorization: bearer hush-7", "tenant: a=b", "colour:", "webhook-id: m-1"] {
        assert!(asked.contains(&format!("\r\n{header}")), "{header}: {asked}");
    }
    let empty = service.folder.path().join("empty");
    std::fs::write(&empty, "\n").expect("written");
    let empty = empty.display().to_string();
    for wrong in [
        ["--header", "tenant"],
        ["--priority", "urgent"],
        ["--delay", "604801"],
        ["--auth-token-file", &empty],
    ] {
        let answer = service.ask(&[&["send"], &wrong[..]].concat());
        assert_eq!(answer.code, 2, "{wrong:?}: {}", answer.stderr);
    }
    let twice = service.ask(&["send", "--header", "a=1", "--header", "a=2"]);
    assert!(twice.code == 2 && twice.stderr.contains("two headers a"), "{}", twice.stderr);
}

#[test]
fn what_is_sent_with_a_delay_waits_in_its_queue_with_its_group() {
    let service = Running::start(&[]);
    service.tell(&["send", "--group", "late", "--delay", "3600"]);
    service.tell(&["send", "--group", "late"]);
    service.tell(&["send", "--group", "now"]);
    service.delivered("DEFAULT-POOL", 1);
    let why = service.tell(&["explain", "late"]);
    let told = why[0]["explanation"].as_str().unwrap_or_default();
    assert!(told.contains("is not due for"), "{why:?}");
    let to = ["send", "--to", "nats://127.0.0.1:1/orders"];
    let answer = run(&[&to[..], &["--delay", "1"]].concat());
    assert!(answer.code == 2 && answer.stderr.contains("--delay"), "{}", answer.stderr);
}

#[test]
fn lines_are_sent_in_batches_once_per_key() {
    let service = Running::start(&[]);
    let line = |number: u32| {
        json!({"id": format!("m-{number}"), "poolCode": "", "messageGroupId": format!("g-{}", number % 7),
               "mediationType": "SIMULATED", "mediationTarget": "1ms"})
    };
    let lines: Vec<String> = (0..1200).map(|number| line(number).to_string()).collect();
    let lines = lines.join("\n");
    let send = ["send", "--from", "-", "--idempotency-key", "once"];
    let answer = service.ask_with(&lines, &send);
    assert_eq!(answer.code, 0, "{}", answer.stderr);
    assert!(answer.stderr.contains("accepted 1,200 messages"), "{}", answer.stderr);
    let answer = service.ask_with(&lines, &send);
    assert!(answer.stderr.contains("accepted 0 messages"), "{}", answer.stderr);
    assert!(answer.stderr.contains("1,200 had been sent before"), "{}", answer.stderr);
    service.delivered("DEFAULT-POOL", 1200);
}

#[test]
fn one_message_is_sent_once_per_key_and_another_is_refused() {
    let service = Running::start(&[]);
    let send = |payload| ["send", "--idempotency-key", "once", "--payload", payload];
    for answer in ["accepted cli-once", "cli-once had been sent before"] {
        let said = service.ask(&send("{\"order\": 7}"));
        assert!(said.code == 0 && said.stderr.contains(answer), "{}", said.stderr);
    }
    let other = service.ask(&send("{\"order\": 8}"));
    assert_eq!(other.code, 4, "{}", other.stderr);
    assert!(other.stderr.contains("used before"), "{}", other.stderr);
    service.delivered("DEFAULT-POOL", 1);
}

#[test]
fn lines_that_are_wrong_are_named() {
    let service = Running::start(&[]);
    let answer = service.ask_with("{\"id\": \"m\"}\nnonsense\n", &["send", "--from", "-"]);
    assert_eq!(answer.code, 1, "{}", answer.stderr);
    assert!(answer.stderr.contains("line 2 is not a JSON object"), "{}", answer.stderr);
    let answer = service.ask_with("\n{\"id\": \"m\"}\n", &["send", "--from", "-"]);
    assert_eq!(answer.code, 4, "{}", answer.stderr);
    assert!(
        answer.stderr.contains("lines 2 to 2") && answer.stderr.contains("poolCode"),
        "{}",
        answer.stderr
    );
}

#[test]
fn seeded_messages_reach_the_test_targets() {
    let service = Running::start(&[]);
    let seed = ["seed", "--count", "16", "--endpoint", "success", "--groups", "1of8"];
    assert_eq!(service.tell(&seed)[0]["seeded"], 16);
    service.delivered("DEFAULT-POOL", 16);
    // More than one request of the verb, and more than the service makes up at once.
    let many = service.tell(&["seed", "--count", "110000", "--endpoint", "simulated", "--pool", "many"]);
    assert_eq!((many.len(), &many[0]["seeded"]), (1, &json!(110_000)));
    let ids: Vec<&str> = many[0]["ids"].as_array().expect("two").iter().filter_map(Value::as_str).collect();
    assert!(ids[0].ends_with("-0") && ids[1].ends_with("-9999") && ids[0][..13] != ids[1][..13], "{ids:?}");
    let answer = service.ask(&["seed", "--endpoint", "no-such-target"]);
    assert_eq!(answer.code, 4, "{}", answer.stderr);
    assert!(answer.stderr.contains("no-such-target"), "{}", answer.stderr);
}

/// Three messages of the group `g` in the paused pool `orders`.
fn with_three_waiting() -> Running {
    let service = Running::start(&[]);
    let pool = service.tell(&["pools", "set", "orders", "concurrency=2", "attempts=1"]);
    assert_eq!((&pool[0]["code"], &pool[0]["concurrency"]), (&json!("orders"), &json!(2)));
    service
        .until(&["pools"], |pools| pools.iter().any(|one| one["code"] == "orders" && one["state"] == "open"));
    service.tell(&["pools", "pause", "orders"]);
    service.tell(&["send", "--group", "g", "--pool", "orders", "--count", "3", "--target", "SIMULATED 1ms"]);
    service.until(&["lanes"], |lanes| lanes == [json!({"pool": "orders", "group": "g", "depth": 3})]);
    service
}

#[test]
fn a_group_is_explained_parked_skipped_and_resumed() {
    let service = with_three_waiting();
    assert_eq!(service.tell(&["explain", "g"])[0]["state"], "poolPaused");
    assert_eq!(service.tell(&["lanes", "--pool", "DEFAULT-POOL"]), Vec::<Value>::new());
    let answer = service.ask(&["park", "g", "--why", "the warehouse moves"]);
    assert_eq!(answer.code, 0, "{}", answer.stderr);
    assert!(answer.stderr.contains("g is parked in orders"), "{}", answer.stderr);
    service.tell(&["pools", "resume", "orders"]);
    let answer = service.ask(&["explain", "g"]);
    assert!(answer.stdout.starts_with("g in orders: 3 messages; parked"), "{}", answer.stdout);
    assert!(answer.stdout.contains("the warehouse moves"), "{}", answer.stdout);
    service.tell(&["skip", "g"]);
    let letters = service.until(&["dead-letters"], |letters| letters.len() == 1);
    assert_eq!(letters[0]["group"], "g");
    service.tell(&["resume", "g", "--pool", "orders"]);
    service.delivered("orders", 2);

    let sequence = letters[0]["sequence"].to_string();
    assert_eq!(
        service.tell(&["dead-letters", "redrive", &sequence]),
        [json!({"redriven": 1, "missing": []})]
    );
    service.delivered("orders", 3);
    assert_eq!(service.tell(&["dead-letters", "list"]), Vec::<Value>::new());
    let answer = service.ask(&["explain", "g"]);
    assert!(answer.stdout.contains("no message of this group is waiting"), "{}", answer.stdout);
}

#[test]
fn a_parked_group_stays_parked_when_the_process_is_killed() {
    let config =
        "laneway { pools.orders { attempts = 1, exhausted = park-group }, queue.durability = power-loss }";
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("laneway.conf");
    std::fs::write(&file, config).expect("written");
    let file = file.display().to_string();
    let serve = ["serve", "--bind", "127.0.0.1:0", "--json", "--config", &file];
    let service = Running::spawn(&serve);
    // One is parked by an operator, one by its pool; a third one is not.
    service.tell(&["pools", "pause", "orders"]);
    for group in ["by-hand", "free"] {
        service.tell(&[
            "send",
            "--group",
            group,
            "--pool",
            "orders",
            "--count",
            "3",
            "--target",
            "SIMULATED 1ms",
        ]);
    }
    let broken = format!("{}/api/test/client-error", service.url);
    service.tell(&["send", "--group", "by-pool", "--pool", "orders", "--count", "2", "--target", &broken]);
    service.until(&["lanes"], |lanes| lanes.len() == 3);
    service.tell(&["park", "by-hand", "--why", "the warehouse moves"]);
    service.tell(&["pools", "resume", "orders"]);
    service.delivered("orders", 3);
    service.until(&["explain", "by-pool"], |views| views[0]["state"] == "parked");
    // What a pool parks is written a moment later.
    service.tell(&["park", "by-pool"]);

    let service = service.kill_and_spawn(&serve);
    for (group, why, depth) in [("by-hand", "the warehouse moves", 3), ("by-pool", "status 400", 2)] {
        let view = &service
            .until(&["explain", group], |views| views[0]["depth"] == depth && views[0]["state"] == "parked")
            [0];
        let why_now = view["reason"]["why"].as_str().unwrap_or_default();
        assert!(why_now.contains(why), "{view}");
    }
    // What comes now passes by, and nothing of the two was called.
    service.tell(&[
        "send",
        "--group",
        "free",
        "--pool",
        "orders",
        "--count",
        "2",
        "--target",
        "SIMULATED 1ms",
    ]);
    service.delivered("orders", 2);
    assert_eq!(service.tell(&["explain", "by-pool"])[0]["failures"], json!([]));
    service.tell(&["resume", "by-hand"]);
    service.delivered("orders", 5);

    let service = service.kill_and_spawn(&serve);
    service.until(&["explain", "by-pool"], |views| views[0]["state"] == "parked" && views[0]["depth"] == 2);
    assert_eq!(service.tell(&["explain", "by-hand"])[0]["state"], "idle");
}

#[test]
fn dead_letters_are_listed_redriven_and_purged() {
    let service = Running::start(&[]);
    let target = format!("{}/api/test/client-error", service.url);
    service.tell(&["send", "--group", "g", "--count", "3", "--target", &target]);
    service.until(&["dead-letters"], |letters| letters.len() == 3);
    let answer = service.ask(&["dead-letters", "list", "--most", "2"]);
    assert!(answer.stdout.contains("reason") && answer.stdout.lines().count() == 3, "{}", answer.stdout);
    assert!(answer.stderr.contains("there may be more: --after "), "{}", answer.stderr);
    assert_eq!(service.tell(&["dead-letters", "redrive", "--all"]), [json!({"redriven": 3})]);
    service.until(&["dead-letters"], |letters| letters.len() == 3);
    service.until(&["pools"], |pools| pools[0]["held"] == 0);
    let answer = service.ask(&["dead-letters", "redrive", "--all", "--most", "2"]);
    assert!(answer.stderr.contains("2 messages will come again"), "{}", answer.stderr);
    assert!(answer.stderr.contains("1 dead letter left"), "{}", answer.stderr);
    service.until(&["dead-letters"], |letters| letters.len() == 3);
    assert_eq!(service.ask(&["dead-letters", "purge"]).code, 2, "not without being sure");
    assert_eq!(service.tell(&["dead-letters", "purge", "--yes"]), [json!({"purged": 3})]);
    let answer = service.ask(&["dead-letters"]);
    assert!(
        answer.stdout.is_empty() && answer.stderr.contains("there are no dead letters"),
        "{}",
        answer.stderr
    );
}

/// The service answers in pages of a few megabytes; whoever asked for more does not see them.
#[test]
fn long_dead_letters_are_listed_in_as_many_pages_as_it_takes() {
    let service = Running::start(&[]);
    let file = service.folder.path().join("long.json");
    std::fs::write(&file, format!("\"{}\"", "x".repeat(250 * 1024))).expect("written");
    let (file, target) = (format!("@{}", file.display()), format!("{}/api/test/client-error", service.url));
    // A batch of them would be longer than a request may be.
    for _ in 0..20 {
        service.tell(&["send", "--target", &target, "--payload", &file]);
    }
    let listed = ["dead-letters", "list", "--most", "19"];
    service.until(&["dead-letters", "list", "--most", "20"], |letters| letters.len() == 20);
    let letters = service.tell(&listed);
    assert_eq!(letters.len(), 19);
    let answer = service.ask(&listed);
    assert_eq!((answer.code, answer.stdout.lines().count()), (0, 20), "{}", answer.stderr);
    let last = &letters[18]["sequence"];
    assert!(answer.stderr.contains(&format!("there may be more: --after {last}")), "{}", answer.stderr);
    let answer = service.ask(&["dead-letters", "list", "--most", "20"]);
    assert!(!answer.stderr.contains("there may be more"), "{}", answer.stderr);
}

#[test]
fn a_dead_letter_that_is_not_there_cannot_be_redriven() {
    let service = Running::start(&[]);
    let answer = service.ask(&["dead-letters", "redrive", "999999"]);
    assert_eq!(answer.code, 4, "{}", answer.stderr);
    assert!(answer.stderr.contains("there is no dead letter 999999"), "{}", answer.stderr);
    let target = format!("{}/api/test/client-error", service.url);
    service.tell(&["send", "--target", &target]);
    let letters = service.until(&["dead-letters"], |letters| letters.len() == 1);
    let sequence = letters[0]["sequence"].to_string();
    let answer = service.ask(&["dead-letters", "redrive", &sequence, "999998", "999999", "--json"]);
    assert_eq!(answer.code, 4, "{}", answer.stderr);
    assert_eq!(answer.json(), [json!({"redriven": 1, "missing": [999998, 999999]})]);
    assert!(answer.stderr.contains("there are no dead letters 999998, 999999"), "{}", answer.stderr);
}

#[test]
fn pools_are_drained_and_removed() {
    let service = with_three_waiting();
    service.tell(&["pools", "resume", "orders"]);
    service.delivered("orders", 3);
    let answer = service.ask(&["pools"]);
    assert!(answer.stdout.starts_with("pool") && answer.stdout.contains("orders"), "{}", answer.stdout);
    assert_eq!(service.tell(&["pools", "drain", "orders"])[0]["state"], "draining");
    let answer = service.ask(&["pools", "remove", "orders"]);
    assert_eq!(answer.code, 0, "{}", answer.stderr);
    assert!(service.tell(&["pools", "list"]).iter().all(|pool| pool["code"] != "orders"));
    for refused in [&["pools", "pause", "orders"][..], &["pools", "remove", "DEFAULT-POOL"]] {
        assert_eq!(service.ask(refused).code, 4, "{refused:?}");
    }
    let answer = service.ask(&["pools", "set", "orders", "concurrency=0", "attempts=0"]);
    assert_eq!(answer.code, 4, "{}", answer.stderr);
    assert!(answer.stderr.contains("concurrency") && answer.stderr.contains("attempts"), "{}", answer.stderr);
}

#[test]
fn top_shows_what_there_is_as_text_and_as_data() {
    let service = with_three_waiting();
    let answer = service.ask(&["top", "--count", "2", "--interval-millis", "100"]);
    assert_eq!(answer.code, 0, "{}", answer.stderr);
    for part in ["measuring", "0 per second", "orders", "paused", "deepest groups", "sources", "connected"] {
        assert!(answer.stdout.contains(part), "{part} is missing in\n{}", answer.stdout);
    }
    let looks = service.tell(&["top", "--count", "1"]);
    assert_eq!(looks[0]["deepestGroups"][0]["depth"], 3);
}

#[test]
fn a_service_that_is_not_there_is_said_with_the_way_to_start_one() {
    // A port that was free a moment ago.
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a port");
    let url = format!("http://{free}");
    let verbs: [&[&str]; 9] = [
        &["send"],
        &["seed"],
        &["lanes"],
        &["explain", "g"],
        &["park", "g"],
        &["skip", "g"],
        &["pools"],
        &["dead-letters"],
        &["top"],
    ];
    for verb in verbs {
        let answer = run(&[verb, &["--url", &url]].concat());
        assert_eq!(answer.code, 5, "{verb:?}: {}", answer.stderr);
        assert!(answer.stderr.contains(&url) && answer.stderr.contains("serve --demo"), "{}", answer.stderr);
        assert!(answer.stdout.is_empty(), "{verb:?}");
    }
}

#[test]
fn what_the_service_refuses_is_said_in_its_words() {
    let service = Running::start(&[]);
    for refused in [&["explain", "g", "--pool", "no-such-pool"][..], &["lanes", "--pool", "no-such-pool"]] {
        let answer = service.ask(refused);
        assert_eq!(answer.code, 4, "{refused:?}: {}", answer.stderr);
        assert!(answer.stderr.contains("no-such-pool"), "{}", answer.stderr);
    }
    for nothing in [&["park", "nobody"][..], &["resume", "nobody"], &["skip", "nobody"]] {
        let answer = service.ask(nothing);
        assert_eq!(answer.code, 4, "{nothing:?}: {}", answer.stderr);
        assert!(answer.stderr.contains("no pool holds a message"), "{}", answer.stderr);
    }
    let answer = service.ask(&["send", "--target", "ftp://somewhere"]);
    assert_eq!(answer.code, 4, "{}", answer.stderr);
    assert!(answer.stderr.contains("mediationTarget"), "{}", answer.stderr);
}

#[test]
fn a_token_opens_the_door_and_is_never_shown() {
    let secret = "s3cret-of-the-house";
    let service = Running::start(&["--set", &format!("http.admin-token={secret}")]);
    let answer = service.ask(&["pools"]);
    assert_eq!(answer.code, 4, "{}", answer.stderr);
    assert!(answer.stderr.contains("LANEWAY_TOKEN"), "{}", answer.stderr);
    let wrong = service.ask(&["pools", "--token", "another-s3cret"]);
    assert_eq!(wrong.code, 4);
    assert!(!wrong.stderr.contains("another-s3cret"), "{}", wrong.stderr);
    assert_eq!(service.ask(&["pools", "--token", secret]).code, 0);
    let mut command = crate::running::laneway(&["send", "--url", &service.url]);
    let answer =
        crate::running::Answer::of(command.env("LANEWAY_TOKEN", secret).output().expect("the binary runs"));
    assert_eq!(answer.code, 0, "{}", answer.stderr);
    let mut command = crate::running::laneway(&["pools", "--help"]);
    let help =
        crate::running::Answer::of(command.env("LANEWAY_TOKEN", secret).output().expect("the binary runs"));
    assert!(help.stdout.contains("LANEWAY_TOKEN") && !help.stdout.contains(secret), "{}", help.stdout);
}
