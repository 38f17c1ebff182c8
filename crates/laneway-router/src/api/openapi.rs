//! `/openapi.json`: the description of the API, made of the routes themselves and of the schemas in `schemas.json`.

use axum::Json;
use serde_json::{Map, Value, json};

use super::route::Route;

/// By name; a test compares them with what the routes really answer.
const SCHEMAS: &str = include_str!("schemas.json");

/// The route of the document.
pub(super) fn routes(document: Value) -> Vec<Route> {
    let answer = move || async move { Json(document) };
    vec![Route::get("/openapi.json", answer, "This document").gives(200, "OpenApi").open()]
}

/// The document that describes these routes, itself, and the test targets if they are there.
pub(super) fn document(routes: &[Route], has_targets: bool) -> Value {
    let mut paths = Map::new();
    let itself = self::routes(Value::Null);
    for route in routes.iter().chain(&itself) {
        let path = paths.entry(route.path).or_insert_with(|| json!({}));
        path[route.method] = route.operation();
    }
    if has_targets {
        describe_targets(&mut paths);
    }
    let schemas: Value = serde_json::from_str(SCHEMAS).expect("a test reads it");
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Laneway",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Message groups in order, pools in parallel, from a queue to HTTP targets.",
        },
        "security": [{ "token": [] }, {}],
        "paths": paths,
        "components": {
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
            "responses": {
                "Problem": {
                    "description": "What went wrong",
                    "content": { "application/problem+json": { "schema": { "$ref": "#/components/schemas/Problem" } } },
                },
            },
            "schemas": schemas,
        },
    })
}

/// The test targets have a router of their own.
fn describe_targets(paths: &mut Map<String, Value>) {
    let delay = json!([{
        "name": "delayMillis", "in": "query", "required": false, "schema": { "type": "integer" },
        "description": "How long it takes, instead of its own time",
    }]);
    for name in crate::targets::names() {
        let operation = json!({
            "summary": format!("The test target {name}"),
            "parameters": delay,
            "responses": { "default": { "description": "Whatever this target answers" } },
            "security": [],
        });
        paths.insert(format!("/api/test/{name}"), json!({ "post": operation }));
    }
    let schema = json!({ "$ref": "#/components/schemas/TargetStats" });
    let stats = json!({ "description": "OK", "content": { "application/json": { "schema": schema } } });
    let stats = json!({
        "get": { "summary": "What the test targets have seen", "responses": { "200": stats }, "security": [] },
        "delete": { "summary": "Begins to count anew", "responses": { "204": { "description": "No Content" } }, "security": [] },
    });
    paths.insert("/api/test/stats".to_owned(), stats);
}
