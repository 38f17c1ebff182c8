//! `laneway serve` with a lease: waits for its turn, works while it lasts, and stands by again.
//!
//! A turn that is over ends the whole service, at once and without draining: somebody else may work a moment later. What was held goes back to its
//! source, or comes again there when its lease has run out.

use std::sync::Arc;
use std::time::Duration;

use laneway_router::config::Config;
use laneway_router::standby::{Settings, Standby, Turn, answer_meanwhile};
use tokio::sync::Notify;

use super::{Options, announce, drain, start};
use crate::exit::Failure;

/// How often the reason is looked for why the lease cannot be asked for.
const LOOK: Duration = Duration::from_secs(1);

/// Serves, in turns, until it is interrupted.
pub(super) async fn serve(
    options: &Options,
    config: &Config,
    settings: &Settings,
    interrupted: &Arc<Notify>,
) -> Result<(), Failure> {
    let lease = settings.open().map_err(|error| anyhow::anyhow!("laneway.standby.lease: {error}"))?;
    let standby = Arc::new(Standby::begin(lease, settings.time));
    loop {
        eprintln!("standing by: waiting for the lease {:?}", settings.name);
        let token = tokio::select! {
            token = standby.active() => token,
            failed = meanwhile(config, &standby) => return failed,
            () = interrupted.notified() => {
                standby.end().await;
                return Ok(());
            }
        };
        let turn = Turn { standby: Arc::clone(&standby), token };
        let service = start(config.clone(), Some(turn.clone())).await?;
        eprintln!("working: the lease {:?} is held under token {token}", settings.name);
        announce::service(&service, options.json)?;
        tokio::select! {
            () = turn.over() => {
                eprintln!("the lease {:?} is lost; stopping at once", settings.name);
                service.shutdown(Duration::ZERO).await;
            }
            () = interrupted.notified() => {
                let limit = service.config().drain;
                let drained = drain::drain(service, limit, options.json).await;
                standby.end().await;
                return drained;
            }
        }
    }
}

/// Answers at the service's address, and says why it waits when that is not somebody else's turn. Ends only if it cannot answer.
async fn meanwhile(config: &Config, standby: &Standby) -> Result<(), Failure> {
    let tell = async {
        let mut told = None;
        loop {
            let trouble = standby.trouble();
            if trouble != told {
                if let Some(trouble) = &trouble {
                    eprintln!("standing by: {trouble}");
                }
                told = trouble;
            }
            tokio::time::sleep(LOOK).await;
        }
    };
    let bind = config.http.bind;
    tokio::select! {
        answered = answer_meanwhile(bind) => match answered {
            Ok(never) => match never {},
            Err(error) => Err(anyhow::anyhow!("cannot listen on {bind}: {error}").into()),
        },
        () = tell => Ok(()),
    }
}
