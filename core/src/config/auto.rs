//! A configuration value that may be `"auto"`, which means that the program chooses the value.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Either `"auto"` or a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AutoOr<T> {
    /// The program chooses the value.
    #[default]
    Auto,
    /// The value in the configuration.
    Value(T),
}

impl<T: Copy> AutoOr<T> {
    /// The configured value; `None` for `"auto"`.
    pub fn value(self) -> Option<T> {
        match self {
            Self::Auto => None,
            Self::Value(value) => Some(value),
        }
    }
}

impl<T: Serialize> Serialize for AutoOr<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Value(value) => value.serialize(serializer),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for AutoOr<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either<T> {
            Value(T),
            Word(String),
            Other(de::IgnoredAny),
        }
        match Either::deserialize(deserializer)? {
            Either::Value(value) => Ok(Self::Value(value)),
            Either::Word(word) if word == "auto" => Ok(Self::Auto),
            Either::Word(word) => {
                Err(de::Error::custom(format!("got \"{word}\", wanted \"auto\" or a number in range")))
            }
            Either::Other(_) => Err(de::Error::custom("wanted \"auto\" or a number in range")),
        }
    }
}
