//! The key-value store through which the workers of a gang find each other. The launcher holds the values. A worker asks
//! for them over its control socket ([`super::ToLauncher::Store`]), so no process needs to listen for others.
//!
//! Each gang has a store of its own: a worker of an earlier attempt cannot change the keys of a later one.

use std::collections::{BTreeSet, HashMap};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Size limit of a key and of a value, bytes. The largest values are Gloo's addresses, with some hundred bytes per rank.
pub const STORE_BYTES_MAX: usize = 1 << 20;

/// Number of bytes that a store may hold.
const TOTAL_BYTES_MAX: usize = 1 << 30;

/// The value of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreValue(pub Vec<u8>);

impl Serialize for StoreValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&BASE64_STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for StoreValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        BASE64_STANDARD.decode(text).map(Self).map_err(de::Error::custom)
    }
}

/// A question to the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreRequest {
    /// Number of the request; the reply has the same number.
    pub id: u64,
    /// What to do.
    pub operation: StoreOperation,
}

/// What the store must do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StoreOperation {
    /// Give `key` the value `value`.
    Set {
        /// The key.
        key: String,
        /// Its new value.
        value: StoreValue,
    },
    /// Reply with the value of the key, as soon as it has one.
    Get(String),
    /// Forget the request `Get` with this number. There is no reply.
    Forget(u64),
    /// Add a number to a counter, which starts at 0, and reply with the sum.
    Add {
        /// The key.
        key: String,
        /// The number to add.
        amount: i64,
    },
    /// Reply whether the key has a value.
    Contains(String),
    /// Remove the key, and reply whether it had a value.
    Remove(String),
}

/// The reply to a [`StoreRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreReply {
    /// Number of the request.
    pub id: u64,
    /// What the store replied.
    pub answer: StoreAnswer,
}

/// What the store replied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StoreAnswer {
    /// The key was set.
    Done,
    /// The value of the key.
    Value(StoreValue),
    /// The sum.
    Sum(i64),
    /// Yes or no.
    Truth(bool),
    /// The request cannot be carried out, for this reason.
    Refused(String),
}

/// The values of a store, and the ranks that wait for a value. Counters are kept as decimal text, as c10d does.
#[derive(Debug, Clone, Default)]
pub struct KeyValues {
    values: HashMap<String, Vec<u8>>,
    bytes: usize,
    /// The requests that wait for each key: rank and number.
    waiting: HashMap<String, BTreeSet<(u32, u64)>>,
}

impl KeyValues {
    /// Carries out the request of a rank. Returns the replies to send, each with the rank that it belongs to.
    pub fn handle(&mut self, rank: u32, request: StoreRequest) -> Vec<(u32, StoreReply)> {
        let StoreRequest { id, operation } = request;
        let reply = |answer| (rank, StoreReply { id, answer });
        match operation {
            StoreOperation::Set { key, value } => match self.set(&key, value.0) {
                Ok(()) => {
                    let mut replies = self.wake(&key);
                    replies.push(reply(StoreAnswer::Done));
                    replies
                }
                Err(reason) => vec![reply(StoreAnswer::Refused(reason))],
            },
            StoreOperation::Get(key) => match self.values.get(&key) {
                Some(value) => vec![reply(StoreAnswer::Value(StoreValue(value.clone())))],
                None => {
                    self.waiting.entry(key).or_default().insert((rank, id));
                    Vec::new()
                }
            },
            StoreOperation::Forget(forgotten) => {
                self.waiting.retain(|_, waiting| {
                    waiting.remove(&(rank, forgotten));
                    !waiting.is_empty()
                });
                Vec::new()
            }
            StoreOperation::Add { key, amount } => match self.add(&key, amount) {
                Ok(sum) => {
                    let mut replies = self.wake(&key);
                    replies.push(reply(StoreAnswer::Sum(sum)));
                    replies
                }
                Err(reason) => vec![reply(StoreAnswer::Refused(reason))],
            },
            StoreOperation::Contains(key) => vec![reply(StoreAnswer::Truth(self.values.contains_key(&key)))],
            StoreOperation::Remove(key) => {
                let removed = self.values.remove(&key);
                self.bytes -= removed.as_ref().map_or(0, |value| key.len() + value.len());
                vec![reply(StoreAnswer::Truth(removed.is_some()))]
            }
        }
    }

    fn set(&mut self, key: &str, value: Vec<u8>) -> Result<(), String> {
        let (length, was) = (value.len(), self.values.get(key).map_or(0, |value| key.len() + value.len()));
        if key.len() > STORE_BYTES_MAX || length > STORE_BYTES_MAX {
            return Err(format!("a key of {} bytes with a value of {length} bytes is too long", key.len()));
        }
        let bytes = self.bytes - was + key.len() + length;
        if bytes > TOTAL_BYTES_MAX {
            return Err(format!("the store is full: it holds {} bytes", self.bytes));
        }
        self.bytes = bytes;
        self.values.insert(key.to_owned(), value);
        Ok(())
    }

    fn add(&mut self, key: &str, amount: i64) -> Result<i64, String> {
        let text = self.values.get(key).map_or(Ok("0"), |value| std::str::from_utf8(value));
        let count: Option<i64> = text.ok().and_then(|text| text.parse().ok());
        let sum = count.and_then(|count| count.checked_add(amount));
        let sum = sum.ok_or_else(|| format!("cannot add {amount} to the value of {key}"))?;
        self.set(key, sum.to_string().into_bytes())?;
        Ok(sum)
    }

    /// The replies to all requests that wait for `key`.
    fn wake(&mut self, key: &str) -> Vec<(u32, StoreReply)> {
        let value = &self.values[key];
        let waiting = self.waiting.remove(key).unwrap_or_default();
        let answer = || StoreAnswer::Value(StoreValue(value.clone()));
        waiting.into_iter().map(|(rank, id)| (rank, StoreReply { id, answer: answer() })).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(key: &str, value: &[u8]) -> StoreOperation {
        StoreOperation::Set { key: key.to_owned(), value: StoreValue(value.to_vec()) }
    }

    fn answers(store: &mut KeyValues, rank: u32, id: u64, operation: StoreOperation) -> Vec<(u32, u64, StoreAnswer)> {
        let replies = store.handle(rank, StoreRequest { id, operation }).into_iter();
        replies.map(|(rank, reply)| (rank, reply.id, reply.answer)).collect()
    }

    #[test]
    fn value_goes_to_all_that_wait_for_it_and_to_nobody_who_gave_up() {
        let mut store = KeyValues::default();
        let get = || StoreOperation::Get("key".to_owned());
        for (rank, id) in [(1, 7), (1, 8), (2, 7), (3, 1)] {
            assert_eq!(answers(&mut store, rank, id, get()), [], "a key without a value was answered");
        }
        assert_eq!(answers(&mut store, 1, 9, StoreOperation::Forget(8)), []);
        assert_eq!(answers(&mut store, 3, 2, StoreOperation::Forget(1)), []);
        let value = || StoreAnswer::Value(StoreValue(vec![0, 255, 10]));
        let found = answers(&mut store, 0, 4, set("key", &[0, 255, 10]));
        assert_eq!(found, [(1, 7, value()), (2, 7, value()), (0, 4, StoreAnswer::Done)]);
        assert_eq!(answers(&mut store, 3, 3, get()), [(3, 3, value())]);
        assert!(store.waiting.is_empty());
    }

    #[test]
    fn counters_start_at_zero_and_refuse_what_is_no_number() {
        let mut store = KeyValues::default();
        let add = |key: &str, amount| StoreOperation::Add { key: key.to_owned(), amount };
        assert_eq!(answers(&mut store, 0, 1, add("count", 2)), [(0, 1, StoreAnswer::Sum(2))]);
        assert_eq!(answers(&mut store, 1, 1, add("count", -5)), [(1, 1, StoreAnswer::Sum(-3))]);
        let text = StoreAnswer::Value(StoreValue(b"-3".to_vec()));
        assert_eq!(answers(&mut store, 1, 2, StoreOperation::Get("count".to_owned())), [(1, 2, text)]);
        answers(&mut store, 0, 2, set("text", b"one"));
        let refused = answers(&mut store, 0, 3, add("text", 1));
        assert!(matches!(&refused[..], [(0, 3, StoreAnswer::Refused(_))]), "{refused:?}");
        answers(&mut store, 0, 4, add("large", i64::MAX));
        let refused = answers(&mut store, 0, 5, add("large", 1));
        assert!(matches!(&refused[..], [(0, 5, StoreAnswer::Refused(_))]), "{refused:?}");
    }

    #[test]
    fn removed_keys_are_gone_and_their_room_is_free() {
        let mut store = KeyValues::default();
        answers(&mut store, 0, 1, set("key", &[1; 100]));
        answers(&mut store, 0, 2, set("key", &[1; 10]));
        assert_eq!(store.bytes, 13);
        let remove = || StoreOperation::Remove("key".to_owned());
        assert_eq!(answers(&mut store, 0, 3, remove()), [(0, 3, StoreAnswer::Truth(true))]);
        assert_eq!(answers(&mut store, 0, 4, remove()), [(0, 4, StoreAnswer::Truth(false))]);
        let contains = StoreOperation::Contains("key".to_owned());
        assert_eq!(answers(&mut store, 0, 5, contains), [(0, 5, StoreAnswer::Truth(false))]);
        assert_eq!(store.bytes, 0);
        let refused = answers(&mut store, 0, 6, set("key", &vec![0; STORE_BYTES_MAX + 1]));
        assert!(matches!(&refused[..], [(0, 6, StoreAnswer::Refused(_))]), "a value without limit was stored");
    }
}
