//! The secret that all nodes of a run share. Only its digest is kept, so the secret itself cannot reach a log, a
//! configuration or a worker.

use std::fmt;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use sha2::{Digest as _, Sha256};

use crate::error::{LaunchError, refuse, reported};

/// Environment variable with the token, for nodes without `--token-file`. The launcher does not pass it on to workers.
pub const TOKEN_VARIABLE: &str = "LOCDIFF_TOKEN";

/// Random bytes in a new token.
const RANDOM_BYTES: usize = 32;

/// The digest of a token.
#[derive(Clone)]
pub struct Token([u8; 32]);

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Token")
    }
}

impl Token {
    /// Reads a token from a file that only its owner can read. `letters_min` is the smallest number of letters.
    pub fn read(path: &Path, letters_min: usize) -> Result<Self, LaunchError> {
        let about = |error| LaunchError::at(path)(error).about("--token-file");
        let mode = std::fs::metadata(path).map_err(about)?.permissions().mode();
        if mode & 0o077 != 0 {
            refuse!(Usage, "--token-file: other users may read {0}; run `chmod 600 {0}`", path.display());
        }
        let text = std::fs::read_to_string(path).map_err(about)?;
        Self::checked(&text, letters_min).ok_or_else(|| {
            reported!(
                Usage,
                "--token-file: {} must hold one word of at least {letters_min} ASCII letters, digits and signs; \
                 `locdiff-launch token` makes one",
                path.display()
            )
        })
    }

    /// The token in the file `path`, or in [`TOKEN_VARIABLE`] if `path` is empty.
    pub fn of_run(path: &str) -> Result<Self, LaunchError> {
        let letters_min = new_token_letters();
        if !path.is_empty() {
            return Self::read(Path::new(path), letters_min);
        }
        let Some(text) = std::env::var_os(TOKEN_VARIABLE) else {
            refuse!(
                Usage,
                "several nodes need a common token: run `locdiff-launch token > FILE`, copy the file to every node, and \
                 give `--token-file FILE`, or set {TOKEN_VARIABLE}"
            );
        };
        Self::checked(&text.to_string_lossy(), letters_min).ok_or_else(|| {
            reported!(
                Usage,
                "{TOKEN_VARIABLE} must be one word of at least {letters_min} letters; see `locdiff-launch token`"
            )
        })
    }

    fn checked(text: &str, letters_min: usize) -> Option<Self> {
        let token = text.trim();
        let is_valid = token.len() >= letters_min && token.bytes().all(|letter| letter.is_ascii_graphic());
        is_valid.then(|| Self::of(token.as_bytes()))
    }

    /// The token with this text.
    pub fn of(text: &[u8]) -> Self {
        Self(Sha256::digest(text).into())
    }

    /// Whether both tokens are the same. Takes the same time for every wrong token.
    pub fn is_same(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).fold(0, |differences, (one, other)| differences | (one ^ other)) == 0
    }

    /// The key with which connections between nodes are encrypted.
    pub(super) fn key(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Number of letters of [`new_token`].
fn new_token_letters() -> usize {
    (RANDOM_BYTES * 8).div_ceil(6)
}

/// A new random token.
pub fn new_token() -> Result<String, LaunchError> {
    let mut bytes = [0; RANDOM_BYTES];
    random(&mut bytes)?;
    Ok(BASE64_URL_SAFE_NO_PAD.encode(bytes))
}

/// Fills `bytes` with random numbers of the kernel.
pub(crate) fn random(bytes: &mut [u8]) -> Result<(), LaunchError> {
    use std::io::Read as _;
    let path = "/dev/urandom";
    std::fs::File::open(path).and_then(|mut file| file.read_exact(bytes)).map_err(LaunchError::at(path))
}
