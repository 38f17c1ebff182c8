//! How connections are made: TCP, TLS where the scheme asks for it, and a limit on the time that both may take together.
//!
//! `http.rs` builds its pools of connections on this.

use std::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::Uri;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::pki_types::CertificateDer;
use rustls::{ClientConfig, RootCertStore};
use tower_service::Service;

/// TCP, and TLS for https, which offers HTTP/2 and takes what the target prefers.
pub(super) fn tls(trusted: &[CertificateDer<'static>]) -> HttpsConnector<HttpConnector> {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    // A call is one small write; waiting for more of it would only make it late.
    tcp.set_nodelay(true);
    tcp.set_keepalive(Some(Duration::from_secs(60)));
    HttpsConnectorBuilder::new()
        .with_tls_config(config(trusted))
        .https_or_http()
        .enable_http1()
        .enable_http2()
        .wrap_connector(tcp)
}

fn config(trusted: &[CertificateDer<'static>]) -> ClientConfig {
    let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    // What is no certificate is found when the configuration is read; here it would only be one that nothing is signed by.
    roots.add_parsable_certificates(trusted.iter().cloned());
    ClientConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .expect("ring knows the default versions")
        .with_root_certificates(roots)
        .with_no_client_auth()
}

/// A connector with a limit on the time.
#[derive(Clone)]
pub(super) struct Timed<C> {
    inner: C,
    limit: Duration,
}

impl<C> Timed<C> {
    pub(super) fn new(inner: C, limit: Duration) -> Self {
        Timed { inner, limit }
    }
}

impl<C> Service<Uri> for Timed<C>
where
    C: Service<Uri>,
    C::Error: Into<Box<dyn Error + Send + Sync>>,
    C::Future: Send + 'static,
{
    type Response = C::Response;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<C::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = tokio::time::timeout(self.limit, self.inner.call(uri));
        let limit = self.limit;
        Box::pin(async move {
            let late = || std::io::Error::new(std::io::ErrorKind::TimedOut, format!("not within {limit:?}"));
            connecting.await.map_err(|_| late())?.map_err(Into::into)
        })
    }
}
