//! Runs in order: those of one account go one after another, in the order in which they were started, while accounts go beside each other.
//!
//! ```text
//! cargo run -p laneway-flow --example ordered_accounts
//! ```

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use laneway_flow::{Context, Flow, OwnQueue, Settings, Steps, Worker, client, local};
use serde::{Deserialize, Serialize};

#[derive(Clone, Serialize, Deserialize)]
struct Transfer {
    account: String,
    cents: i64,
}

/// Checks a balance in one step and changes it in the next: wrong as soon as two runs of one account mix.
#[derive(Clone, Default)]
struct Book {
    balances: Arc<Mutex<HashMap<String, i64>>>,
}

impl Flow for Book {
    const SLUG: &'static str = "book";
    // Where in the input the key is.
    const KEY: &'static [&'static str] = &["account"];
    type Input = Transfer;
    type Queues = (OwnQueue,);

    fn steps(&self, flow: &mut Steps<Self>) {
        let (seen, written) = (self.balances.clone(), self.balances.clone());
        let look = flow.step("look").run(move |transfer: Transfer, _| {
            let balance = seen.lock().unwrap().get(&transfer.account).copied().unwrap_or(0);
            async move { Ok(balance) }
        });
        flow.step("write").after(&look).run(move |balance: i64, context: Context<Self>| {
            let written = written.clone();
            async move {
                let transfer = context.flow_input()?;
                written.lock().unwrap().insert(transfer.account, balance + transfer.cents);
                Ok(balance + transfer.cents)
            }
        });
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let database = local::trial_database().await?;
    let book = Book::default();
    let settings = Settings { max_concurrent: 8, ..Settings::default() };
    let worker = Worker::on(&database.pool).serve(book.define()?).settings(settings).start().await?;
    let transfers: Vec<Transfer> = (0..90)
        .map(|number| Transfer { account: format!("account-{}", number % 3), cents: number })
        .collect();
    let runs = client::start_many(&database.pool, "book", &transfers).await?;
    for run in runs {
        let state = client::wait(&database.pool, run, Duration::from_secs(45)).await?;
        assert_eq!(state.status(), "completed", "{:#}", state.json());
    }
    worker.stop().await;
    let balances = book.balances.lock().unwrap();
    for account in 0..3 {
        let right: i64 = transfers.iter().skip(account).step_by(3).map(|transfer| transfer.cents).sum();
        let balance = balances[&format!("account-{account}")];
        println!("account-{account}: {balance}");
        assert_eq!(balance, right, "no run saw a balance that another was about to change");
    }
    Ok(())
}
