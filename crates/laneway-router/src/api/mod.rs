//! The HTTP API of the service.

mod server;

pub(crate) use server::{Server, serve};

fn routes(service: crate::service::Service) -> axum::Router {
    let router = axum::Router::new();
    match service.targets() {
        Some(targets) => router.nest("/api/test", targets.router()),
        None => router,
    }
}
