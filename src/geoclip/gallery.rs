//! The embeddings of a gallery. A gallery is a list of places: the 100,000 MP16 places that come with GeoCLIP, or any
//! other list.
//!
//! Embeddings are computed once and cached in the folder of the weights. Cached embeddings are bit-identical to
//! computed ones. The cache file of GeoCLIP's gallery is `gallery-cpu.f32` or `gallery-cuda.f32`. For any other
//! gallery, the file name also contains a checksum of the places.
//!
//! A cache file consists of a magic number, a key, the checksum of the rows, and the rows. Each row has 512
//! little-endian f32. The key is a checksum of the weights, the gallery and the kind of device. If the length, the key
//! or the checksum of a cache file is wrong, the file is ignored and the embeddings are computed again.

use std::fs::File;
use std::hash::Hasher as _;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use locdiff_core::geo::Place;
use twox_hash::XxHash3_64;

use super::EMBEDDING_WIDTH;
use super::error::GeoclipError;
use super::folder::Geoclip;
use super::tiles::Embedder;

const MAGIC: [u8; 8] = *b"LOCDGAL1";
const HEADER_BYTES: usize = 24;
/// Number of rows that are read or written at once.
const PIECE_ROWS: usize = 2048;

/// The places of a gallery, and the embeddings that have been computed so far.
#[derive(Debug)]
pub struct GalleryEmbeddings {
    places: Vec<Place>,
    embeddings: Vec<f32>,
    computed: Vec<bool>,
    cache: PathBuf,
    key: u64,
}

impl GalleryEmbeddings {
    /// Opens GeoCLIP's own gallery. If an earlier run cached the embeddings, they are loaded.
    pub fn open(geoclip: &Geoclip, embedder: &Embedder) -> Self {
        Self::with_cache(geoclip, embedder, geoclip.places().to_vec(), "gallery", geoclip.checksum())
    }

    /// Opens a gallery of the given places instead of GeoCLIP's own. Its cache file is `gallery-<checksum of the
    /// places>-{cpu,cuda}.f32`. If an earlier run cached the embeddings, they are loaded.
    pub fn of_places(geoclip: &Geoclip, embedder: &Embedder, places: Vec<Place>) -> Self {
        let mut digest = XxHash3_64::new();
        for place in &places {
            // Hash the coordinates as f32, because the encoder takes f32.
            for degrees in [place.latitude().0, place.longitude().0] {
                digest.write(&(degrees as f32).to_le_bytes());
            }
        }
        let name = format!("gallery-{:016x}", digest.finish());
        digest.write(&geoclip.checksum().to_le_bytes());
        Self::with_cache(geoclip, embedder, places, &name, digest.finish())
    }

    fn with_cache(geoclip: &Geoclip, embedder: &Embedder, places: Vec<Place>, name: &str, key: u64) -> Self {
        let kind = if embedder.device().is_cuda() { "cuda" } else { "cpu" };
        let mut gallery = Self {
            embeddings: vec![0.0; places.len() * EMBEDDING_WIDTH],
            computed: vec![false; places.len()],
            places,
            cache: geoclip.folder().join(format!("{name}-{kind}.f32")),
            key: XxHash3_64::oneshot_with_seed(key, kind.as_bytes()),
        };
        if gallery.cache.exists() {
            match gallery.read_cache() {
                Ok(()) => gallery.computed.fill(true),
                Err(reason) => {
                    tracing::warn!("{}: {reason}; computing the gallery embeddings again", gallery.cache.display())
                }
            }
        }
        gallery
    }

    /// The places of the gallery.
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// Whether all embeddings have been computed or loaded.
    pub fn is_whole(&self) -> bool {
        self.computed.iter().all(|computed| *computed)
    }

    /// The embedding of the place with this index. Panics if the embedding was neither loaded nor computed by
    /// [`Self::ensure`] or [`Self::complete`].
    pub fn embedding(&self, index: usize) -> &[f32] {
        assert!(self.computed[index], "the embedding of gallery point {index} has not been computed");
        &self.embeddings[index * EMBEDDING_WIDTH..(index + 1) * EMBEDDING_WIDTH]
    }

    /// All embeddings, in rows of 512. Panics unless [`Self::is_whole`].
    pub fn into_embeddings(self) -> Vec<f32> {
        assert!(self.is_whole(), "not all embeddings of the gallery have been computed");
        self.embeddings
    }

    /// Computes the embeddings of the places with these indices, except those that have already been computed or
    /// loaded.
    pub fn ensure(
        &mut self,
        indices: impl IntoIterator<Item = usize>,
        embedder: &Embedder,
    ) -> Result<(), GeoclipError> {
        let mut missing: Vec<usize> = indices.into_iter().filter(|index| !self.computed[*index]).collect();
        missing.sort_unstable();
        missing.dedup();
        let places: Vec<Place> = missing.iter().map(|index| self.places[*index]).collect();
        let embedded = embedder.embed(&places)?;
        for (index, row) in missing.iter().zip(embedded.chunks_exact(EMBEDDING_WIDTH)) {
            self.embeddings[index * EMBEDDING_WIDTH..(index + 1) * EMBEDDING_WIDTH].copy_from_slice(row);
            self.computed[*index] = true;
        }
        Ok(())
    }

    /// Computes all missing embeddings and writes the cache. Calls `progress` with the number of places done.
    pub fn complete(&mut self, embedder: &Embedder, mut progress: impl FnMut(usize)) -> Result<(), GeoclipError> {
        if self.is_whole() {
            return Ok(());
        }
        for first in (0..self.places.len()).step_by(4 * PIECE_ROWS) {
            let end = (first + 4 * PIECE_ROWS).min(self.places.len());
            self.ensure(first..end, embedder)?;
            progress(end);
        }
        // A failed write is not an error, because the next run can compute the embeddings again.
        if let Err(error) = self.write_cache() {
            tracing::warn!("cannot cache the gallery embeddings in {}: {error}", self.cache.display());
        }
        Ok(())
    }

    fn read_cache(&mut self) -> Result<(), String> {
        let mut file = File::open(&self.cache).map_err(|error| error.to_string())?;
        let want = (HEADER_BYTES + 4 * self.embeddings.len()) as u64;
        let got = file.metadata().map_err(|error| error.to_string())?.len();
        if got != want {
            return Err(format!("the file has {got} bytes, wanted {want}"));
        }
        let mut header = [0; HEADER_BYTES];
        file.read_exact(&mut header).map_err(|error| error.to_string())?;
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| header[at + byte]));
        if header[..8] != MAGIC || word(8) != self.key {
            return Err("the embeddings belong to other weights, another gallery or another kind of device".to_owned());
        }
        let mut digest = XxHash3_64::new();
        let mut bytes = vec![0; 4 * EMBEDDING_WIDTH * PIECE_ROWS];
        for piece in self.embeddings.chunks_mut(EMBEDDING_WIDTH * PIECE_ROWS) {
            let bytes = &mut bytes[..4 * piece.len()];
            file.read_exact(bytes).map_err(|error| error.to_string())?;
            digest.write(bytes);
            for (value, word) in piece.iter_mut().zip(bytes.chunks_exact(4)) {
                *value = f32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            }
        }
        let (got, want) = (digest.finish(), word(16));
        if got == want { Ok(()) } else { Err(format!("checksum is {got:016x}, wanted {want:016x}")) }
    }

    fn write_cache(&self) -> std::io::Result<()> {
        let temporary = self.cache.with_extension(format!("new-{}", std::process::id()));
        let written = self.write_rows(&temporary).and_then(|()| std::fs::rename(&temporary, &self.cache));
        if written.is_err() {
            // Ignore a failed removal, because the caller reports the write error.
            let _ = std::fs::remove_file(&temporary);
        }
        written
    }

    fn write_rows(&self, path: &Path) -> std::io::Result<()> {
        let mut digest = XxHash3_64::new();
        let bytes_of = |piece: &[f32]| piece.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let pieces = || self.embeddings.chunks(EMBEDDING_WIDTH * PIECE_ROWS);
        pieces().for_each(|piece| digest.write(&bytes_of(piece)));
        let mut file = BufWriter::new(File::create(path)?);
        file.write_all(&MAGIC)?;
        file.write_all(&self.key.to_le_bytes())?;
        file.write_all(&digest.finish().to_le_bytes())?;
        pieces().try_for_each(|piece| file.write_all(&bytes_of(piece)))?;
        file.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()
    }
}
