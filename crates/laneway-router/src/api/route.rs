//! A route: its handler and its description in one place, so that the description cannot forget one.
//!
//! Every resource's file gives a list of these; `mod.rs` makes the router of them, and `openapi.rs` the document.

use axum::handler::Handler;
use axum::routing::{self, MethodRouter};
use serde_json::{Map, Value, json};

use crate::service::Service;

/// One method of one path.
pub(super) struct Route {
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    pub(super) handler: MethodRouter<Service>,
    summary: &'static str,
    parameters: Vec<Value>,
    takes: Option<Value>,
    gives: Vec<(u16, Option<Value>, &'static str)>,
    is_paged: bool,
    is_open: bool,
}

impl Route {
    fn new(
        method: &'static str,
        path: &'static str,
        handler: MethodRouter<Service>,
        summary: &'static str,
    ) -> Self {
        Route {
            method,
            path,
            handler,
            summary,
            parameters: Vec::new(),
            takes: None,
            gives: Vec::new(),
            is_paged: false,
            is_open: false,
        }
    }

    pub(super) fn get<H, T>(path: &'static str, handler: H, summary: &'static str) -> Self
    where
        H: Handler<T, Service>,
        T: 'static,
    {
        Route::new("get", path, routing::get(handler), summary)
    }

    pub(super) fn post<H, T>(path: &'static str, handler: H, summary: &'static str) -> Self
    where
        H: Handler<T, Service>,
        T: 'static,
    {
        Route::new("post", path, routing::post(handler), summary)
    }

    pub(super) fn put<H, T>(path: &'static str, handler: H, summary: &'static str) -> Self
    where
        H: Handler<T, Service>,
        T: 'static,
    {
        Route::new("put", path, routing::put(handler), summary)
    }

    pub(super) fn delete<H, T>(path: &'static str, handler: H, summary: &'static str) -> Self
    where
        H: Handler<T, Service>,
        T: 'static,
    {
        Route::new("delete", path, routing::delete(handler), summary)
    }

    /// A parameter of the query.
    pub(super) fn query(mut self, name: &str, kind: &str, what: &str) -> Self {
        self.parameters.push(json!({ "name": name, "in": "query", "required": false, "description": what, "schema": { "type": kind } }));
        self
    }

    /// A header of the request.
    pub(super) fn header(mut self, name: &str, what: &str) -> Self {
        self.parameters.push(json!({ "name": name, "in": "header", "required": false, "description": what, "schema": { "type": "string" } }));
        self
    }

    /// Its body, by the name of its schema.
    pub(super) fn takes(mut self, schema: &str) -> Self {
        self.takes = Some(schema_of(schema));
        self
    }

    /// An answer, by the name of its schema; `[Pool]` is a list.
    pub(super) fn gives(mut self, status: u16, schema: &str) -> Self {
        self.gives.push((status, Some(schema_of(schema)), "application/json"));
        self
    }

    /// An answer in another form.
    pub(super) fn gives_text(mut self, status: u16, media_type: &'static str) -> Self {
        self.gives.push((status, Some(json!({ "type": "string" })), media_type));
        self
    }

    /// Its answer names the next page, where there is one.
    pub(super) fn paged(mut self) -> Self {
        self.is_paged = true;
        self
    }

    /// Needs no token.
    pub(super) fn open(mut self) -> Self {
        self.is_open = true;
        self
    }

    /// As OpenAPI describes it.
    pub(super) fn operation(&self) -> Value {
        let mut operation = Map::new();
        operation.insert("summary".to_owned(), json!(self.summary));
        let names = self.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
        let in_path = names.map(
            |name| json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string" } }),
        );
        let parameters: Vec<Value> = in_path.chain(self.parameters.iter().cloned()).collect();
        if !parameters.is_empty() {
            operation.insert("parameters".to_owned(), json!(parameters));
        }
        if let Some(schema) = &self.takes {
            let body = json!({ "content": { "application/json": { "schema": schema } } });
            operation.insert("requestBody".to_owned(), body);
        }
        let mut responses = Map::new();
        for (status, schema, media_type) in &self.gives {
            let description =
                axum::http::StatusCode::from_u16(*status).ok().and_then(|status| status.canonical_reason());
            let mut response = json!({ "description": description.unwrap_or("") });
            if let Some(schema) = schema {
                let media_type = if *status >= 400 { super::problem::MEDIA_TYPE } else { media_type };
                response["content"] = json!({ media_type: { "schema": schema } });
            }
            if self.is_paged {
                response["headers"] = json!({ "Link": { "description": "The next page, as <path>; rel=\"next\", where there is more", "schema": { "type": "string" } } });
            }
            responses.insert(status.to_string(), response);
        }
        responses.insert("default".to_owned(), json!({ "$ref": "#/components/responses/Problem" }));
        operation.insert("responses".to_owned(), Value::Object(responses));
        if self.is_open {
            operation.insert("security".to_owned(), json!([]));
        }
        Value::Object(operation)
    }
}

fn schema_of(name: &str) -> Value {
    match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(item) => json!({ "type": "array", "items": schema_of(item) }),
        None => json!({ "$ref": format!("#/components/schemas/{name}") }),
    }
}
