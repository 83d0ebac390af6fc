//! Turns stored embeddings into queries, chooses a head for the data, and checks whether a head fits the data.
//!
//! A head maps the stored embedding of each view into the space of the gallery. The query of an image is the mean of
//! the unit vectors of its mapped views, times a factor. The factor is `exp(logit_scale)`, or `retrieval.knn_scale` for
//! the head "knn". A logit is the factor times a cosine. The dot product of a query with the unit vector of a gallery
//! point is therefore the mean of the views' logits. GeoCLIP, too, averages the logits of its ten crops.
//!
//! The head processes embeddings in tiles with a fixed number of rows, on one thread, and views are summed in order. On
//! one kind of device, the bits of a query therefore depend only on the head and the image.
// Letters in tensor names: i images, v views, r = i·v rows, e width of a stored embedding, w width of a gallery
// embedding, t rows of a tile.

use locdiff_core::config::RetrievalHead;
use tch::{Device, Kind, Tensor};

use super::error::RetrievalError;
use super::retriever::{GPU_QUERIES, padded};
use crate::geoclip::{EMBEDDING_WIDTH, FEATURE_WIDTH, Geoclip, GeoclipHead, tile_rows};

/// Features count as normalised if their mean length (L2 norm) differs from 1 by less than this.
const UNIT_LENGTH_SLACK: f64 = 0.02;

/// GeoCLIP recognises the places of photos if [`DataFacts::place_rank`] is less than this. With features of another
/// encoder, `place_rank` is within a few hundredths of 0.5.
const PLACE_RANK_MAX: f64 = 0.25;

/// The image head that the manifest of the data declares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataHead {
    /// GeoCLIP's image head, for embeddings that are CLIP features.
    Geoclip,
    /// The linear head, for embeddings of photos simulated in world 1.
    Linear,
    /// Only a head that was trained on such embeddings. They are embeddings of photos simulated in world 2.
    Trained,
    /// The data has no manifest, or the manifest names no head.
    Unknown,
}

/// Facts about the data that decide which head can be used.
#[derive(Debug, Clone)]
pub struct DataFacts {
    /// Location of the data, for error messages.
    pub location: String,
    /// Width of the embeddings.
    pub width: usize,
    /// The head that the manifest declares.
    pub image_head: DataHead,
    /// Mean length (L2 norm) of the embeddings, if known. For data with a manifest, the root mean square of the
    /// lengths.
    pub mean_length: Option<f64>,
    /// How GeoCLIP ranks the true place of a photo among the places of other photos, as a mean over some photos: 0 is
    /// the first rank, 1 the last, and 0.5 is chance. `None` if it was not measured.
    pub place_rank: Option<f64>,
}

impl DataFacts {
    fn is_normalised(&self) -> bool {
        self.mean_length.is_some_and(|length| (length - 1.0).abs() < UNIT_LENGTH_SLACK)
    }

    /// Whether the embeddings may be CLIP features that GeoCLIP's image head can use, although no manifest says so.
    pub fn may_be_clip(&self) -> bool {
        self.image_head == DataHead::Unknown && self.width == FEATURE_WIDTH && !self.is_normalised()
    }

    /// The head for `retrieval.head = "auto"`, with the reason for the choice. The chosen head can always be used with
    /// the data. `has_geoclip` says whether GeoCLIP's weights exist.
    pub fn fitting_head(&self, has_geoclip: bool) -> (RetrievalHead, String) {
        let width = self.width;
        match self.image_head {
            _ if width != FEATURE_WIDTH => {
                let reason = format!("the embeddings have {width} numbers, and GeoCLIP's have {FEATURE_WIDTH}");
                (RetrievalHead::Knn, reason)
            }
            DataHead::Trained => {
                let reason = "the photos are simulated in world 2, whose image head must be trained first \
                              (`locdiff-launch --config geoclip --run NAME train`, then `--set retrieval.run=NAME`)";
                (RetrievalHead::Knn, reason.to_owned())
            }
            _ if !has_geoclip => {
                let reason = "there are no GeoCLIP weights; `locdiff-launch geoclip import` fetches them";
                (RetrievalHead::Knn, reason.to_owned())
            }
            DataHead::Linear => (RetrievalHead::Linear, "the photos are simulated".to_owned()),
            _ if self.is_normalised() => {
                (RetrievalHead::Knn, "the embeddings are normalised, and GeoCLIP's are not".to_owned())
            }
            DataHead::Geoclip => (RetrievalHead::Geoclip, "the manifest says that these are CLIP features".to_owned()),
            DataHead::Unknown => match (self.place_rank, self.foreign_to_geoclip()) {
                (None, _) => {
                    let reason = "there are too few photos to tell whether GeoCLIP recognises their places";
                    (RetrievalHead::Knn, reason.to_owned())
                }
                (_, Some(reason)) => (RetrievalHead::Knn, reason),
                _ => (RetrievalHead::Geoclip, "GeoCLIP recognises the places of these photos".to_owned()),
            },
        }
    }

    /// A message if GeoCLIP's image head does not recognise the places of the photos. The embeddings then come from
    /// another encoder, or the photos do not show where they were taken.
    pub fn foreign_to_geoclip(&self) -> Option<String> {
        let percent = self.place_rank.filter(|rank| *rank >= PLACE_RANK_MAX)? * 100.0;
        Some(format!(
            "GeoCLIP does not recognise the places of these photos (it ranks the true place at {percent:.0} % on \
             average, and chance is 50 %)"
        ))
    }
}

/// Checks that a head can be used with the data. The error says why the head cannot be used and, in most cases, names a
/// head that can.
pub fn check_head(head: RetrievalHead, data: &DataFacts) -> Result<(), RetrievalError> {
    let refuse = |name: &'static str, reason: String| {
        Err(RetrievalError::Head { head: name, location: data.location.clone(), reason })
    };
    let knn = "set retrieval.head = \"knn\", which takes any embedding";
    match (head, data.image_head) {
        // "auto" always chooses a head that can be used.
        (RetrievalHead::Auto | RetrievalHead::Knn, _) => Ok(()),
        (RetrievalHead::Trained, _) if data.width == FEATURE_WIDTH => Ok(()),
        (RetrievalHead::Trained, _) => {
            let got = data.width;
            refuse(
                "trained",
                format!("its embeddings have width {got}, but trained heads take width {FEATURE_WIDTH}; {knn}"),
            )
        }
        (RetrievalHead::Geoclip | RetrievalHead::Linear, DataHead::Trained) => refuse(
            head.name(),
            format!(
                "this head cannot use these embeddings (world 2); train a head (`--config geoclip`) and set \
                 retrieval.run, or {knn}"
            ),
        ),
        (RetrievalHead::Geoclip, DataHead::Linear) => refuse(
            "geoclip",
            "its photos are simulated, but GeoCLIP's image head takes only CLIP features; set \
             retrieval.head = \"linear\""
                .into(),
        ),
        (RetrievalHead::Geoclip, _) if data.width != FEATURE_WIDTH => {
            let got = data.width;
            let reason =
                format!("its embeddings have width {got}, but GeoCLIP's image head takes width {FEATURE_WIDTH}; {knn}");
            refuse("geoclip", reason)
        }
        (RetrievalHead::Geoclip, _) => match data.mean_length {
            Some(length) if data.is_normalised() => refuse(
                "geoclip",
                format!(
                    "its embeddings have mean length {length:.3}, so they seem to be normalised, but GeoCLIP's image \
                     head takes CLIP ViT-L/14 features that are not normalised; store such features, or {knn}"
                ),
            ),
            _ => Ok(()),
        },
        (RetrievalHead::Linear, DataHead::Linear) if data.width == FEATURE_WIDTH => Ok(()),
        (RetrievalHead::Linear, DataHead::Linear) => refuse(
            "linear",
            format!("its embeddings have width {}, but simulated embeddings have width {FEATURE_WIDTH}", data.width),
        ),
        (RetrievalHead::Linear, DataHead::Geoclip) => refuse(
            "linear",
            "its manifest says that the embeddings are CLIP features; set retrieval.head = \"geoclip\"".into(),
        ),
        (RetrievalHead::Linear, DataHead::Unknown) => refuse(
            "linear",
            format!(
                "no manifest says that the photos are simulated; set retrieval.head = \"geoclip\" for CLIP features, \
                 or {knn}"
            ),
        ),
    }
}

/// Turns stored embeddings into queries.
#[derive(Debug)]
pub struct QueryHead {
    kind: HeadKind,
    factor: f64,
    device: Device,
}

#[derive(Debug)]
enum HeadKind {
    Geoclip(GeoclipHead),
    /// Multiplies embeddings by the projection Q of simulated photos, `[768, 512]`.
    Linear(Tensor),
    /// Uses the stored embeddings unchanged.
    Knn,
}

impl QueryHead {
    /// GeoCLIP's own head.
    pub fn geoclip(geoclip: &Geoclip, device: Device) -> Result<Self, RetrievalError> {
        Ok(Self::of(geoclip.image_head(device)?, device))
    }

    /// A head with GeoCLIP's layers and any weights. The weights must be on `device`.
    pub fn of(head: GeoclipHead, device: Device) -> Self {
        let factor = head.logit_factor();
        Self { kind: HeadKind::Geoclip(head), factor, device }
    }

    /// The head for simulated photos. `projection_ew` is their projection Q, `[768, 512]`. The factor that turns a
    /// cosine into a logit is GeoCLIP's.
    pub fn linear(geoclip: &Geoclip, projection_ew: &Tensor, device: Device) -> Result<Self, RetrievalError> {
        let want = [FEATURE_WIDTH as i64, EMBEDDING_WIDTH as i64];
        if projection_ew.size() != want {
            let (got, want) = (format!("{:?}", projection_ew.size()), format!("{want:?}"));
            return Err(RetrievalError::Shape { what: "projection of simulated photos", got, want });
        }
        let factor = geoclip.image_head(Device::Cpu)?.logit_factor();
        let projection_ew = projection_ew.f_to_device(device)?.f_to_kind(Kind::Float)?;
        Ok(Self { kind: HeadKind::Linear(projection_ew), factor, device })
    }

    /// The head for a gallery of photos. A logit is the cosine of two stored embeddings times `scale`.
    pub fn knn(scale: f64, device: Device) -> Self {
        Self { kind: HeadKind::Knn, factor: scale, device }
    }

    /// The factor that turns a cosine into a logit.
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// Computes the queries `[images, width]` from the stored embeddings `[images, views, stored width]`. Queries are
    /// f32 in main memory.
    pub fn queries(&self, embeddings_ive: &Tensor) -> Result<Tensor, RetrievalError> {
        let shape = embeddings_ive.size();
        let &[images, views, width] = &shape[..] else {
            let want = "[images, views, width]".to_owned();
            return Err(RetrievalError::Shape { what: "embeddings of images", got: format!("{shape:?}"), want });
        };
        if !matches!(self.kind, HeadKind::Knn) && width != FEATURE_WIDTH as i64 {
            let (got, want) = (format!("width {width}"), FEATURE_WIDTH.to_string());
            return Err(RetrievalError::Shape { what: "embeddings of images", got, want });
        }
        let rows_re = embeddings_ive.f_reshape([images * views, width])?;
        let rows = self.embed_all(&rows_re)?;
        let width = if matches!(self.kind, HeadKind::Knn) { width as usize } else { EMBEDDING_WIDTH };
        let mut queries = Vec::with_capacity(images as usize * width);
        for (image, views_of_image) in rows.chunks_exact(width * views as usize).enumerate() {
            queries.extend(self.mean(image, views_of_image, width)?);
        }
        Ok(Tensor::f_from_slice(&queries)?.f_view([images, width as i64])?)
    }

    /// Computes the query of one image. `views` holds the outputs of the head for the views of the image. The query is
    /// the mean of their unit vectors, times `self.factor`.
    fn mean(&self, image: usize, views: &[f32], width: usize) -> Result<Vec<f32>, RetrievalError> {
        let mut sum = vec![0.0_f64; width];
        for view in views.chunks_exact(width) {
            let length = view.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
            if !(length.is_finite() && length > 0.0) {
                return Err(RetrievalError::NoDirection { what: "image", row: image });
            }
            sum.iter_mut().zip(view).for_each(|(sum, value)| *sum += f64::from(*value) / length);
        }
        let scale = self.factor * width as f64 / views.len() as f64;
        Ok(sum.into_iter().map(|value| (value * scale) as f32).collect())
    }

    /// Passes every row through the head in padded tiles. The output is not normalised.
    fn embed_all(&self, rows_re: &Tensor) -> Result<Vec<f32>, RetrievalError> {
        let tile = if self.device.is_cuda() { GPU_QUERIES } else { tile_rows(self.device) } as i64;
        let rows = rows_re.size()[0];
        let mut out = Vec::new();
        let threads = tch::get_num_threads();
        tch::set_num_threads(1);
        let result = (0..rows).step_by(tile as usize).try_for_each(|first| {
            let count = tile.min(rows - first);
            let tile_te = rows_re.f_narrow(0, first, count)?.f_to_device(self.device)?.f_to_kind(Kind::Float)?;
            let embedded =
                self.embed(&padded(tile_te, tile as usize)?)?.f_narrow(0, 0, count)?.f_to_device(Device::Cpu)?;
            out.extend(Vec::<f32>::try_from(embedded.f_contiguous()?.f_view([-1])?)?);
            Ok(())
        });
        tch::set_num_threads(threads);
        result.map(|()| out)
    }

    fn embed(&self, rows_te: &Tensor) -> Result<Tensor, RetrievalError> {
        tch::no_grad(|| match &self.kind {
            HeadKind::Geoclip(head) => Ok(head.encode(rows_te)?),
            HeadKind::Linear(projection_ew) => Ok(rows_te.f_matmul(projection_ew)?),
            HeadKind::Knn => Ok(rows_te.shallow_clone()),
        })
    }
}
