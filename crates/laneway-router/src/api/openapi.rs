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

/// The document that describes these routes, itself included.
pub(super) fn document(routes: &[Route]) -> Value {
    let mut paths = Map::new();
    let itself = self::routes(Value::Null);
    for route in routes.iter().chain(&itself) {
        let path = paths.entry(route.path).or_insert_with(|| json!({}));
        path[route.method] = route.operation();
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
