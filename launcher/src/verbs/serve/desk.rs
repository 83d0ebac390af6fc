//! The photos that wait for the worker. Tasks of the HTTP thread ask, and the supervisor's observer answers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use locdiff_core::protocol::{PhotoToLocate, PredictedRow, RefusedPhoto, ServedModel, ToWorker};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

/// Most photos that wait or are being located.
const WAITING_MAX: usize = 1024;

/// Why a photo gets no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NoAnswer {
    /// The photo itself cannot be located.
    Refused(String),
    /// No worker serves at the moment.
    Closed(String),
    /// Too many photos are waiting.
    Full,
}

/// What a client waits for.
pub(super) type Reply = oneshot::Receiver<Result<PredictedRow, NoAnswer>>;

/// The queue between the HTTP thread and the worker.
pub(super) struct Desk {
    state: Mutex<DeskState>,
    orders: UnboundedSender<ToWorker>,
}

struct DeskState {
    /// The model that is being served, or the reason why there is none.
    model: Result<ServedModel, String>,
    /// Photos that the worker has not answered, by number. They count even if their clients are gone.
    waiting: HashMap<u64, oneshot::Sender<Result<PredictedRow, NoAnswer>>>,
    next: u64,
}

impl Desk {
    /// A desk without a worker. The messages for the worker come out of the receiver.
    pub(super) fn new() -> (Arc<Self>, UnboundedReceiver<ToWorker>) {
        let (orders, receiver) = unbounded_channel();
        let model = Err("the model is being loaded".to_owned());
        let state = Mutex::new(DeskState { model, waiting: HashMap::new(), next: 0 });
        (Arc::new(Self { state, orders }), receiver)
    }

    /// The model that is being served.
    pub(super) fn model(&self) -> Result<ServedModel, NoAnswer> {
        self.lock().model.clone().map_err(NoAnswer::Closed)
    }

    /// Passes photos to the worker. Takes all of them or none.
    pub(super) fn ask(&self, embeddings: Vec<Vec<u16>>, with_density: bool) -> Result<Vec<Reply>, NoAnswer> {
        let mut state = self.lock();
        state.model.as_ref().map_err(|reason| NoAnswer::Closed(reason.clone()))?;
        if state.waiting.len() + embeddings.len() > WAITING_MAX {
            return Err(NoAnswer::Full);
        }
        let mut replies = Vec::new();
        for embedding in embeddings {
            let (sender, reply) = oneshot::channel();
            let number = state.next;
            state.next += 1;
            state.waiting.insert(number, sender);
            replies.push(reply);
            // The receiver lives as long as the command.
            let _ = self.orders.send(ToWorker::Locate(PhotoToLocate { number, embedding, with_density }));
        }
        Ok(replies)
    }

    /// A worker has loaded the model.
    pub(super) fn open(&self, model: ServedModel) {
        self.lock().model = Ok(model);
    }

    /// The worker has ended. All photos that wait get no answer.
    pub(super) fn close(&self, reason: &str) {
        let mut state = self.lock();
        state.model = Err(reason.to_owned());
        for (_, sender) in state.waiting.drain() {
            // The client may be gone.
            let _ = sender.send(Err(NoAnswer::Closed(reason.to_owned())));
        }
    }

    /// The worker has located a photo.
    pub(super) fn answer(&self, row: PredictedRow) {
        self.finish(row.index, Ok(row));
    }

    /// The worker cannot locate a photo.
    pub(super) fn refuse(&self, photo: RefusedPhoto) {
        self.finish(photo.number, Err(NoAnswer::Refused(photo.reason)));
    }

    fn finish(&self, number: u64, found: Result<PredictedRow, NoAnswer>) {
        if let Some(sender) = self.lock().waiting.remove(&number) {
            // The client may be gone.
            let _ = sender.send(found);
        }
    }

    fn lock(&self) -> MutexGuard<'_, DeskState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> ServedModel {
        ServedModel { step: 1, width: 2, head: None, gallery_points: None }
    }

    #[test]
    fn desk_without_a_worker_takes_nothing_and_a_closed_one_answers_all_who_wait() {
        let (desk, mut orders) = Desk::new();
        let closed = |found: Result<_, NoAnswer>| matches!(found, Err(NoAnswer::Closed(_)));
        assert!(closed(desk.ask(vec![vec![0; 2]], false).map(drop)) && closed(desk.model().map(drop)));
        desk.open(model());
        let mut replies = desk.ask(vec![vec![0; 2], vec![1; 2]], true).expect("the desk is open");
        desk.refuse(RefusedPhoto { number: 0, reason: "zeros".to_owned() });
        desk.close("the worker has ended");
        let found: Vec<_> = replies.iter_mut().map(|reply| reply.try_recv().expect("there is an answer")).collect();
        assert_eq!(found[0], Err(NoAnswer::Refused("zeros".to_owned())));
        assert_eq!(found[1], Err(NoAnswer::Closed("the worker has ended".to_owned())));
        assert!(orders.try_recv().is_ok() && orders.try_recv().is_ok() && orders.try_recv().is_err());
    }

    #[test]
    fn photos_of_clients_that_are_gone_still_count_until_they_are_answered() {
        let (desk, _orders) = Desk::new();
        desk.open(model());
        drop(desk.ask(vec![vec![0; 2]; WAITING_MAX], false).expect("there is room"));
        assert_eq!(desk.ask(vec![vec![0; 2]], false).map(drop), Err(NoAnswer::Full));
        desk.refuse(RefusedPhoto { number: 7, reason: String::new() });
        assert!(desk.ask(vec![vec![0; 2]], false).is_ok());
    }
}
