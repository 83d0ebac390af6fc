//! Keys that another process holds. Questions and replies are messages, which the owner of [`RemoteKeys`] passes on.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use locdiff_core::protocol::{StoreAnswer, StoreOperation, StoreReply, StoreRequest, StoreValue};

use crate::native::c10d::Keys;

/// How long to wait for the reply to a question that the store answers at once.
const PATIENCE: Duration = Duration::from_secs(300);

/// Keys that another process holds.
pub struct RemoteKeys {
    send: Box<dyn Fn(StoreRequest) -> Result<(), String> + Send + Sync>,
    calls: Mutex<OpenCalls>,
    changed: Condvar,
}

#[derive(Default)]
struct OpenCalls {
    /// Number of the newest request.
    newest: u64,
    /// The answers that have arrived and were not fetched yet; `None` for requests without an answer.
    answers: HashMap<u64, Option<StoreAnswer>>,
}

impl RemoteKeys {
    /// `send` sends a request to the process that holds the keys. The replies must be passed to [`Self::deliver`].
    pub fn new(send: impl Fn(StoreRequest) -> Result<(), String> + Send + Sync + 'static) -> Self {
        Self { send: Box::new(send), calls: Mutex::default(), changed: Condvar::new() }
    }

    /// Passes a reply to the call that waits for it. Ignores the reply if the call has given up.
    pub fn deliver(&self, reply: StoreReply) {
        if let Some(answer) = self.lock().answers.get_mut(&reply.id) {
            *answer = Some(reply.answer);
            self.changed.notify_all();
        }
    }

    fn ask(&self, operation: StoreOperation, timeout: Duration) -> Result<StoreAnswer, String> {
        let begun = Instant::now();
        let can_be_forgotten = matches!(operation, StoreOperation::Get(_));
        let mut calls = self.lock();
        calls.newest += 1;
        let id = calls.newest;
        calls.answers.insert(id, None);
        drop(calls);
        if let Err(error) = (self.send)(StoreRequest { id, operation }) {
            self.lock().answers.remove(&id);
            return Err(error);
        }
        let is_open = |calls: &mut OpenCalls| calls.answers[&id].is_none();
        let waited = self.changed.wait_timeout_while(self.lock(), timeout.saturating_sub(begun.elapsed()), is_open);
        let mut calls = waited.unwrap_or_else(PoisonError::into_inner).0;
        match calls.answers.remove(&id).flatten() {
            Some(StoreAnswer::Refused(reason)) => Err(reason),
            Some(answer) => Ok(answer),
            None => {
                drop(calls);
                if can_be_forgotten {
                    let operation = StoreOperation::Forget(id);
                    let id = 0;
                    (self.send)(StoreRequest { id, operation })?;
                }
                Err(format!("timeout: no reply within {:.1} s", timeout.as_secs_f64()))
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, OpenCalls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Keys for RemoteKeys {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
        let operation = StoreOperation::Set { key: key.to_owned(), value: StoreValue(value.to_vec()) };
        match self.ask(operation, PATIENCE)? {
            StoreAnswer::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String> {
        match self.ask(StoreOperation::Get(key.to_owned()), timeout)? {
            StoreAnswer::Value(value) => Ok(value.0),
            other => Err(unexpected(&other)),
        }
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, String> {
        match self.ask(StoreOperation::Add { key: key.to_owned(), amount }, PATIENCE)? {
            StoreAnswer::Sum(sum) => Ok(sum),
            other => Err(unexpected(&other)),
        }
    }

    fn contains(&self, key: &str) -> Result<bool, String> {
        match self.ask(StoreOperation::Contains(key.to_owned()), PATIENCE)? {
            StoreAnswer::Truth(truth) => Ok(truth),
            other => Err(unexpected(&other)),
        }
    }

    fn remove(&self, key: &str) -> Result<bool, String> {
        match self.ask(StoreOperation::Remove(key.to_owned()), PATIENCE)? {
            StoreAnswer::Truth(truth) => Ok(truth),
            other => Err(unexpected(&other)),
        }
    }
}

fn unexpected(answer: &StoreAnswer) -> String {
    format!("the store sent an unexpected reply: {answer:?}")
}

impl fmt::Debug for RemoteKeys {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("RemoteKeys").finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Arc, Weak};

    use locdiff_core::protocol::KeyValues;

    use super::*;

    /// Keys that this process holds.
    pub(crate) fn own_keys() -> Arc<RemoteKeys> {
        let store = Mutex::new(KeyValues::default());
        Arc::new_cyclic(|keys: &Weak<RemoteKeys>| {
            let keys = Weak::clone(keys);
            RemoteKeys::new(move |request| {
                let replies = store.lock().expect("no thread panics with the lock").handle(0, request);
                let keys = keys.upgrade().expect("the keys exist while they are used");
                replies.into_iter().for_each(|(_, reply)| keys.deliver(reply));
                Ok(())
            })
        })
    }

    #[test]
    fn several_threads_wait_at_once() {
        let keys = own_keys();
        std::thread::scope(|scope| {
            let names = ["a", "b", "c"];
            let waiting = names.map(|key| {
                let keys = &keys;
                scope.spawn(move || keys.get(key, PATIENCE))
            });
            assert!(
                keys.get("never", Duration::from_millis(50)).expect_err("nobody sets this key").contains("timeout")
            );
            names.iter().for_each(|key| keys.set(key, key.as_bytes()).expect("a short value is accepted"));
            for (waiter, key) in waiting.into_iter().zip(names) {
                assert_eq!(waiter.join().expect("no panic").as_deref(), Ok(key.as_bytes()));
            }
        });
        assert!(keys.lock().answers.is_empty(), "a call left something behind");
    }
}
