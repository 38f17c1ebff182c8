//! Layers over layers: which value wins, where it came from, and what is said about texts that are no configuration.

use std::{fs, path::PathBuf};

use laneway_config::Layers;

/// A folder of its own for a test, gone afterwards.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("laneway-config-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a folder for the test");
        Folder(path)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).expect("a file of the test");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn the_highest_layer_that_speaks_wins_and_is_named() {
    let folder = Folder::new("wins");
    let file = folder.write("application.conf", "app { b = 20, c = 30, d = 40 }");
    let variables = [("LANEWAY_X", "1"), ("APP_C", "300"), ("APP_D", "400"), ("APP_NEW__KEY", "a text: [")];
    let config = Layers::new()
        .text("reference.conf", "app { a = 1, b = 2, c = 3, d = 4 }")
        .file(&file)
        .environment("APP", variables.map(|(name, value)| (name.to_owned(), value.to_owned())))
        .set("app.d", "4000")
        .load()
        .expect("all well-formed");
    let seen: Vec<_> = config
        .effective("app")
        .into_iter()
        .map(|it| format!("{} = {} <- {}", it.path, it.value, it.origin))
        .collect();
    let file = file.display();
    let wanted = [
        "app.a = 1 <- reference.conf".to_owned(),
        format!("app.b = 20 <- {file}"),
        "app.c = 300 <- $APP_C".to_owned(),
        "app.d = 4000 <- --set app.d".to_owned(),
        "app.new-key = \"a text: [\" <- $APP_NEW__KEY".to_owned(),
    ];
    let mut seen_sorted = seen.clone();
    seen_sorted.sort();
    assert_eq!(seen_sorted, wanted);
    assert_eq!(config.origin("app.absent"), None);
}

#[test]
fn a_substitution_that_comes_to_nothing_leaves_the_origin_below() {
    let config = Layers::new()
        .text("reference.conf", "a = 1\nb = 2")
        .text("application.conf", "a = ${?LANEWAY_CONFIG_TEST_IS_NOT_SET}\nb = ${c}\nc = 3")
        .load()
        .expect("resolvable");
    assert_eq!(config.origin("a").as_deref(), Some("reference.conf"));
    assert_eq!(config.origin("b").as_deref(), Some("application.conf"));
}

#[test]
fn substitutions_see_all_layers() {
    let config = Layers::new()
        .text("reference.conf", "base = 10\nlimit = ${base}000")
        .text("application.conf", "base = 7")
        .load()
        .expect("resolvable");
    assert_eq!(
        config.read("", |s| (s.integer("base", 0..=9), s.integer("limit", 0..=9_999))),
        Ok((7, 7_000))
    );
}

#[test]
fn a_part_can_be_mounted_elsewhere() {
    let config = Layers::new()
        .mounted("reference.conf", "product.events { a = 1, b { c = 2 } }", "product.events", "their.engine")
        .text("application.conf", "their.engine.b.c = 5")
        .load()
        .expect("well-formed");
    assert_eq!(config.origin("their.engine.a").as_deref(), Some("reference.conf"));
    assert_eq!(config.origin("their.engine.b.c").as_deref(), Some("application.conf"));
}

#[test]
fn the_whole_document_can_be_mounted_and_mounted_on() {
    let text = "product.events { a = 1, b { c = 2 } }";
    let config =
        Layers::new().mounted("reference.conf", text, "product.events", "").load().expect("a section");
    assert_eq!(config.origin("b.c").as_deref(), Some("reference.conf"));
    assert_eq!(config.origin("product"), None);
    let config = Layers::new().mounted("reference.conf", text, "", "their").load().expect("a document");
    assert_eq!(config.origin("their.product.events.a").as_deref(), Some("reference.conf"));
}

#[test]
fn a_part_that_is_not_there_cannot_be_mounted() {
    let error = Layers::new()
        .mounted("reference.conf", "product.events.a = 1", "product.evens", "their.engine")
        .mounted("other.conf", "a = 1", "a", "")
        .load()
        .expect_err("neither is a section");
    let text = error.to_string();
    assert!(text.contains("reference.conf: there is nothing at product.evens"), "{text}");
    assert!(text.contains("other.conf: what is at a is no section"), "{text}");
}

#[test]
fn all_that_cannot_be_loaded_is_said_at_once() {
    let folder = Folder::new("errors");
    let stray = folder.write("stray.conf", "a = 1\n}\nb = 2");
    let large = folder.write("large.conf", &" ".repeat((1 << 20) + 1));
    let error = Layers::new()
        .text("first", "a = [1, 2")
        .file(&stray)
        .file(&large)
        .file(folder.0.join("absent.conf"))
        .file_if_present(folder.0.join("absent.conf"))
        .text("last", "a = = 1")
        .load()
        .expect_err("five problems");
    let text = error.to_string();
    assert_eq!(error.problems.len(), 5, "{text}");
    assert!(text.contains("first:1:5: '[' is never closed"), "{text}");
    assert!(text.contains("stray.conf:2:1: '}' closes nothing"), "{text}");
    assert!(text.contains("large.conf: is larger than 1048576 bytes"), "{text}");
    assert!(text.contains("absent.conf: "), "{text}");
    assert!(text.contains("last:1:"), "{text}");
}

#[test]
fn included_files_are_held_to_the_same() {
    let folder = Folder::new("includes");
    folder.write("fine.conf", "b = 2");
    folder.write("broken.conf", "c = 3 }\nd = 4");
    let good = folder.write("good.conf", "include \"fine.conf\"\na = 1");
    let bad = folder.write("bad.conf", "include \"fine\"\ninclude \"broken.conf\"");
    let config = Layers::new().file(good).load().expect("includes a good file");
    assert_eq!(config.read("", |s| (s.integer("a", 0..=9), s.integer("b", 0..=9))), Ok((1, 2)));
    let error = Layers::new().file(bad).load().expect_err("includes a broken file").to_string();
    assert!(error.contains("broken.conf:1:7: '}' closes nothing"), "{error}");
    let loops = folder.write("loop.conf", "include \"loop.conf\"\na = 1");
    assert!(Layers::new().file(loops).load().is_err(), "a file that includes itself");
}

#[test]
fn a_substitution_of_nothing_is_an_error_with_its_name() {
    let error = Layers::new().text("application.conf", "a = ${not.there}").load().expect_err("nothing there");
    assert!(error.to_string().contains("not.there"), "{error}");
}

#[test]
fn secrets_are_not_shown() {
    let config = Layers::new()
        .text("application.conf", "db { password = hunter2, url = \"pg://me:hunter2@db/x\" }")
        .load()
        .expect("well-formed");
    let shown = format!("{config:?}");
    assert!(!shown.contains("hunter2"), "{shown}");
    let error = config.read("db", |s| s.integer("password", 0..=1)).expect_err("not a number").to_string();
    assert!(!error.contains("hunter2"), "{error}");
    assert!(error.contains("db.password = (hidden) (application.conf): must be a whole number"), "{error}");
}

#[test]
fn a_part_of_a_secret_and_a_secret_part_are_hidden() {
    let config =
        Layers::new().text("application.conf", "passwords = [a]\nusers = {}").load().expect("well-formed");
    let read = config.read("", |s| {
        s.problem_in("passwords", "[0]", "hunter2", "too short");
        s.problem_in("users", ".me.password", "hunter2", "too short");
        s.problem_in("users", ".me.name", "me", "too short");
    });
    let error = read.expect_err("three problems").to_string();
    assert!(!error.contains("hunter2") && error.contains("users.me.name = me"), "{error}");
}

/// A variable that begins alike need not be meant for the program; one that was mistyped must be seen all the same.
#[test]
fn variables_that_name_no_setting_are_left_out_and_told() {
    let variables = [
        ("APP_SEED", "1"),
        ("APP_HTTP_ADMIN_TOKEN", "hunter2"),
        ("APP_POOLS_MINE_THREDS", "9"),
        ("APP_POOLS_YOURS_THREADS", "9"),
        ("APP_PORT", "tcp://10.0.0.1:80"),
        ("APP_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("APP_HTTP_BIND_X", "1"),
    ];
    let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let read = |s: &mut laneway_config::Section<'_>| {
        s.section("http", |s| (s.text("bind"), s.text("admin-token")));
        s.sections("pools", |_, s| s.integer("threads", 1..=9))
    };
    let reference = "app { http { bind = here, admin-token = \"\" }, pools { all { threads = 1 } } }";
    let config = Layers::new().text("reference.conf", reference).environment("APP", variables.clone()).load();
    let settled = config.expect("well-formed").settle("app", read);
    let told: Vec<_> = settled.strays.iter().map(ToString::to_string).collect();
    let wanted = [
        "app.http.admin.token ($APP_HTTP_ADMIN_TOKEN): no setting has this name, and it is left out; did you mean APP_HTTP_ADMIN__TOKEN?",
        "app.http.bind.x ($APP_HTTP_BIND_X): no setting has this name, and it is left out; did you mean APP_HTTP_BIND?",
        "app.pools.mine.threds ($APP_POOLS_MINE_THREDS): no setting has this name, and it is left out; did you mean APP_POOLS_MINE_THREADS?",
        "app.port ($APP_PORT): no setting has this name, and it is left out",
        "app.port.80.tcp.addr ($APP_PORT_80_TCP_ADDR): no setting has this name, and it is left out",
        "app.seed ($APP_SEED): no setting has this name, and it is left out",
    ];
    assert_eq!(told, wanted);
    assert_eq!(settled.read, Ok(vec![("all".to_owned(), 1), ("yours".to_owned(), 9)]));
    assert!(
        settled.config.effective("").iter().all(|it| it.path != "app.seed" && it.path != "app.http.bind.x")
    );

    // What a file says is meant for the program, and so is a variable that names a setting.
    let config = Layers::new()
        .text("reference.conf", reference)
        .text("application.conf", "app { seed = 2 }")
        .environment("APP", variables)
        .set("app.pools.all.threads", "0")
        .load();
    let settled = config.expect("well-formed").settle("app", read);
    let error = settled.read.expect_err("two mistakes").to_string();
    assert!(error.contains("app.seed = 1 ($APP_SEED): unknown key"), "{error}");
    assert!(error.contains("app.pools.all.threads = 0 (--set app.pools.all.threads): must be"), "{error}");
    assert_eq!(settled.strays.len(), 5, "{:?}", settled.strays);
}

#[test]
fn a_value_of_a_variable_that_is_wrong_is_an_error() {
    let load = |name: &str, value: &str| {
        let variables = [(name.to_owned(), value.to_owned())];
        let config =
            Layers::new().text("reference.conf", "app { http { port = 1 } }").environment("APP", variables);
        let settled = config
            .load()
            .expect("well-formed")
            .settle("app", |s| s.section("http", |s| s.integer("port", 1..=9)));
        (settled.read.map_err(|error| error.problems.len()), settled.strays.len())
    };
    assert_eq!(load("APP_HTTP_PORT", "many"), (Err(1), 0));
    assert_eq!(load("APP_HTTP", "many"), (Err(1), 0));
    assert_eq!(load("APP_HTTP", "{ port = 2, prot = 3 }"), (Err(1), 0), "the variable names a setting");
    assert_eq!(load("APP_HTTP_PROT", "3"), (Ok(1), 1));
}
