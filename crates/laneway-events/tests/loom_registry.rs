//! Registration against shutdown, under every interleaving: the registry (`src/registry.rs`).
//!
//! What is checked: a registration is refused, or the shutdown finds it. One that is neither would be a processor that runs on after the end.

#![cfg(loom)]

use std::sync::Arc;

use laneway_events::model::{NotInserted, Registry};
use loom::thread;

fn insert(registry: &Registry<u8>, id: &str, one: u8) -> Result<(), NotInserted> {
    registry.insert(&Arc::from(id), &Arc::new(one), || Ok(()))
}

#[test]
fn a_registration_is_refused_or_found_by_the_shutdown() {
    loom::model(|| {
        let registry = Arc::new(Registry::default());
        let registers = {
            let registry = registry.clone();
            thread::spawn(move || [insert(&registry, "a", 1), insert(&registry, "b", 2)])
        };
        registry.close();
        let at_close: Vec<u8> = registry.take_all().into_iter().map(|one| *one).collect();
        let results = registers.join().unwrap();
        let registered = results.iter().filter(|result| result.is_ok()).count();
        assert_eq!(at_close.len(), registered, "all that were registered were found");
        assert_eq!(insert(&registry, "c", 3), Err(NotInserted::Closed));
        assert_eq!(registry.count(), 0);
    });
}

#[test]
fn an_id_is_given_to_one_of_two() {
    loom::model(|| {
        let registry = Arc::new(Registry::default());
        let other = {
            let registry = registry.clone();
            thread::spawn(move || insert(&registry, "a", 2))
        };
        let mine = insert(&registry, "a", 1);
        let results = [mine, other.join().unwrap()];
        assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1, "{results:?}");
        assert!(results.contains(&Err(NotInserted::Taken)));
    });
}
