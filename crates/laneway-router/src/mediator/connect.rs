//! How connections are made: TCP, TLS where the scheme asks for it, and a limit on the time that both may take together.
//!
//! `connections.rs` keeps what is made here.

use std::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::Uri;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::pki_types::{CertificateDer, pem::PemObject};
use rustls::{ClientConfig, RootCertStore};
use tower_service::Service;

/// TCP, and TLS for https, which offers HTTP/2 and takes what the target prefers.
pub(crate) fn tls(trusted: &[CertificateDer<'static>]) -> HttpsConnector<HttpConnector> {
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

/// Why a text is not a list of certificates.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadCertificate {
    /// Not one in it.
    #[error("there is no certificate in it: expected `-----BEGIN CERTIFICATE-----`")]
    None,
    /// One that cannot be read.
    #[error("certificate number {number} cannot be used: {problem}")]
    Unusable {
        /// Which one, from 1.
        number: usize,
        /// What is wrong with it.
        problem: String,
    },
}

/// The certificates of a PEM text, each of which could be trusted.
pub(crate) fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, BadCertificate> {
    let mut roots = RootCertStore::empty();
    let usable = CertificateDer::pem_slice_iter(pem).zip(1..).map(|(certificate, number)| {
        let unusable = |problem: &dyn std::fmt::Display| BadCertificate::Unusable {
            number,
            problem: problem.to_string(),
        };
        let certificate = certificate.map_err(|problem| unusable(&problem))?;
        roots.add(certificate.clone()).map_err(|problem| unusable(&problem))?;
        Ok(certificate)
    });
    let usable: Vec<_> = usable.collect::<Result<_, _>>()?;
    if usable.is_empty() { Err(BadCertificate::None) } else { Ok(usable) }
}

fn config(trusted: &[CertificateDer<'static>]) -> ClientConfig {
    let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    // `HttpSettings::trust_pem` has looked at them; one that was put in by hand and is none is not trusted, and that is all.
    roots.add_parsable_certificates(trusted.iter().cloned());
    ClientConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .expect("ring knows the default versions")
        .with_root_certificates(roots)
        .with_no_client_auth()
}

/// A connector with a limit on the time.
#[derive(Clone)]
pub(crate) struct Timed<C> {
    inner: C,
    limit: Duration,
}

impl<C> Timed<C> {
    pub(crate) fn new(inner: C, limit: Duration) -> Self {
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
