//! The router's command line, against a real service that is a subprocess: serving, operating, configuring.

mod running;

mod config;
mod operating;
#[cfg(unix)]
mod serve;
