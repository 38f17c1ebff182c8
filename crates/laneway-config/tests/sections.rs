//! Typed reading: every question's right answers, and what is said about wrong ones.

use std::time::Duration;

use laneway_config::{Config, Layers};

fn config(text: &str) -> Config {
    Layers::new().text("application.conf", text).load().expect("well-formed")
}

fn problems(text: &str, read: impl FnOnce(&mut laneway_config::Section<'_>)) -> Vec<String> {
    let error = config(text).read("a", read).expect_err("something is wrong");
    error.problems.iter().map(ToString::to_string).collect()
}

#[test]
fn every_type_is_read() {
    let text = r#"a {
        integer = 7, quoted = "8", number = 1.5, text = hello, flag = on, time = 250 ms, bare = 30, size = 64 KiB
        words = [x, "y z"], rows = [["", a], [b]], choice = slow
        inner { x = 1 }, named { one { x = 1 }, "" { x = 2 } }, items = [{ x = 1 }, { x = 2 }]
    }"#;
    config(text)
        .read("a", |s| {
            assert_eq!((s.integer("integer", 0..=9), s.integer("quoted", 0..=9)), (7, 8));
            assert_eq!(s.number("number", "above 1", |n| n > 1.0), 1.5);
            assert_eq!((s.text("text").as_str(), s.flag("flag")), ("hello", true));
            let any = Duration::ZERO..=Duration::from_secs(9);
            assert_eq!(s.duration("time", any.clone()), Duration::from_millis(250));
            assert_eq!(s.duration("bare", any), Duration::from_millis(30));
            assert_eq!(s.bytes("size", 0..=1 << 20), 65_536);
            assert_eq!(s.texts("words"), ["x", "y z"]);
            assert_eq!(s.rows("rows"), Some(vec![vec![String::new(), "a".to_owned()], vec!["b".to_owned()]]));
            assert_eq!(s.one_of("choice", &[("quick", 1), ("slow", 2)]), 2);
            assert_eq!(s.section("inner", |s| s.integer("x", 0..=9)), 1);
            let named = s.sections("named", |_, s| s.integer("x", 0..=9));
            assert_eq!(named, [("one".to_owned(), 1), (String::new(), 2)]);
            assert_eq!(s.list("items", |s| s.integer("x", 0..=9)), [1, 2]);
            assert_eq!(s.optional("absent", |s| s.integer("absent", 0..=9)), None);
            assert!(s.has("integer") && !s.has("absent"));
        })
        .expect("all is right");
}

#[test]
fn everything_that_is_wrong_is_said_in_one_go() {
    let text = "a { n = 0, m = many, t = 5 parsecs, f = perhaps, r = [[a], b], c = odd, i = 3, items = [{ x = -1 }], nul = null }";
    let found = problems(text, |s| {
        s.integer("n", 1..=100);
        s.number("m", "above 1.0", |n| n > 1.0);
        s.duration("t", Duration::ZERO..=Duration::from_secs(1));
        s.flag("f");
        s.rows("r");
        s.one_of("c", &[("quick", 1), ("slow", 2)]);
        s.section("i", |s| s.integer("x", 0..=9));
        s.list("items", |s| s.integer("x", 0..=9));
        s.text("nul");
        s.problem_in("r", "[1]", "b", "must be a row");
    });
    let wanted = [
        "a.n = 0 (application.conf): must be a whole number from 1 to 100",
        "a.m = \"many\" (application.conf): must be a number above 1.0",
        "a.t = \"5 parsecs\" (application.conf): must be a time from 0ns to 1s, such as \"250 ms\"",
        "a.f = \"perhaps\" (application.conf): must be true or false",
        "a.r = [[\"a\"], \"b\"] (application.conf): must be a list of lists of texts, such as [[\"a\", \"b\"], [\"a\"]]",
        "a.c = \"odd\" (application.conf): must be one of quick, slow",
        "a.i = 3 (application.conf): must be a section in braces",
        "a.items[0].x = -1 (application.conf): must be a whole number from 0 to 9",
        "a.nul: missing, must be a text",
        "a.r[1] = b (application.conf): must be a row",
    ];
    assert_eq!(found, wanted);
}

#[test]
fn unknown_keys_are_errors_with_the_nearest_known_one() {
    let read = |s: &mut laneway_config::Section<'_>| {
        s.optional("scheduler-pool-size", |s| s.integer("scheduler-pool-size", 1..=9));
        s.section("backoff", |s| drop(s.optional("multiplier", |s| s.text("multiplier"))));
    };
    let found = problems("a { schedulerPoolSize = 3, zebra = 1, backoff { mutliplier = 2 } }", read);
    let wanted = [
        "a.backoff.mutliplier = 2 (application.conf): unknown key, did you mean \"multiplier\"?",
        "a.schedulerPoolSize = 3 (application.conf): unknown key, did you mean \"scheduler-pool-size\"?",
        "a.zebra = 1 (application.conf): unknown key, there are scheduler-pool-size, backoff",
    ];
    assert_eq!(found, wanted);
}

#[test]
fn a_section_that_is_missing_reports_what_it_lacks() {
    let error = config("b = 1").read("a", |s| s.integer("n", 1..=2)).expect_err("nothing there").to_string();
    assert!(error.contains("a.n: missing, must be a whole number from 1 to 2"), "{error}");
}

#[test]
fn the_whole_document_can_be_read() {
    let error = config("a = 1, typo = 2").read("", |s| s.integer("a", 0..=9)).expect_err("an unknown key");
    assert_eq!(error.problems[0].path, "typo");
    assert_eq!(config("a = 1").read("", |s| s.integer("a", 0..=9)), Ok(1));
}
