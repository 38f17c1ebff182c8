//! The flow of `laneway flow dev`: document 002's example, with two specialised queues, a map, and a step that is completed by hand.

use std::time::Duration;

use laneway_flow::{Context, Defined, Flow, OwnQueue, Steps, queues};
use serde::{Deserialize, Serialize};

queues! {
    pub(super) EmailWorker = "email_worker";
}

/// What a run is started with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Order {
    /// Whose it is.
    pub(super) customer: String,
    /// What was ordered.
    pub(super) items: Vec<String>,
}

/// An order: priced item by item, announced by mail, and, if it is large, approved by somebody.
pub(super) struct OrderFlow;

/// How long each step takes: long enough to be seen.
const PACE: Duration = Duration::from_millis(400);

impl Flow for OrderFlow {
    const SLUG: &'static str = "order_flow";
    type Input = Order;
    type Queues = (OwnQueue, EmailWorker);

    fn steps(&self, flow: &mut Steps<Self>) {
        let items = flow.array("items").run(|order: Order, _| async move {
            tokio::time::sleep(PACE).await;
            Ok(order.items)
        });
        let prices = flow.map("price", &items).run(|item: String, context: Context<Self>| async move {
            tokio::time::sleep(PACE + PACE * (context.index() as u32 % 3)).await;
            Ok(item.len() as u64 * 100)
        });
        let total = flow
            .step("total")
            .after(&prices)
            .run(|prices: Vec<u64>, _| async move { Ok(prices.iter().sum::<u64>()) });
        flow.step("notify").after(&total).queue(EmailWorker).run(
            |cents: u64, context: Context<Self>| async move {
                tokio::time::sleep(PACE).await;
                let customer = context.flow_input()?.customer;
                Ok(format!("Dear {customer}, that is {}.{:02}", cents / 100, cents % 100))
            },
        );
        flow.step("approve").after(&total).manual::<bool>();
    }
}

/// The flow, ready to be served.
pub(super) fn defined() -> Defined<OrderFlow> {
    OrderFlow.define().expect("a test defines it")
}

/// An order to try.
pub(super) fn order() -> Order {
    Order {
        customer: "Ada".into(),
        items: ["book", "lamp", "chair", "table", "pen"].map(String::from).to_vec(),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_demonstration_is_a_flow() {
        assert_eq!(super::defined().definition().queues(), ["order_flow", "email_worker"]);
    }
}
