//! What language models optimize.
//!
//! Main types: [`CausalTask`] and [`Objective`]. Next-token prediction takes the mean negative
//! log-likelihood over the positions of a batch that predict a token. Preference optimization
//! compares completions. With the log-probability `l(y)` of a completion, summed over its tokens,
//! and `l_ref(y)` under the reference:
//!
//! ```text
//! r(y) = l(y) - l_ref(y)
//! sigmoid    -log(sigmoid(beta (r(chosen) - r(rejected))))                     Rafailov et al. 2023, equation 7
//! ipo        (r(chosen) / |chosen| - r(rejected) / |rejected| - 1 / (2 beta))^2    Azar et al. 2023, equation 17
//! ```
//!
//! The lengths in `ipo` are TRL's, whose authors confirmed them with the authors of the paper.

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::activation::log_sigmoid;
use burn::tensor::backend::Backend;
use burn::tensor::{ElementConversion, Tensor, TensorData};
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::zero::{Training, Zero};
use deepburn::{
    Answers, BoxError, Engine, Evaluation, GeneratedTexts, Interrupt, RewardSums, Task,
};
use deepburn_config::{DpoPlan, Job, PreferenceLoss};
use deepburn_datasets::{MicroBatch, PairBatch, RowDocuments};
use deepburn_models::causal_lm::{CausalBatch, InputError, LanguageModel};
use deepburn_models::decoder::{AnyDecoder, Decoder};
use deepburn_models::{BatchShape, LanguageModelConfig};

use crate::data::recipe::ExampleTask;
use crate::data::text_sampler::TextSampler;
use crate::data::token_batch::{PreferenceBatch, ReferenceLogProbs, TokenBatch, causal_batch};

/// What is optimized.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Objective {
    /// The likelihood of the next token.
    NextToken {
        /// The factor of label smoothing, in training and in evaluation.
        label_smoothing: f64,
    },
    /// Preferences between completions.
    Preferences(DpoPlan),
}

impl Objective {
    /// Returns the objective of a job.
    pub(crate) fn of(job: &Job) -> Self {
        let label_smoothing = job.training.objective.label_smoothing_factor;
        job.training.objective.dpo.map_or(Self::NextToken { label_smoothing }, Self::Preferences)
    }
}

/// The task of a language model.
///
/// It has the configuration, so that batches are checked before they are copied to the device. To
/// check a tensor on a device, it would have to be copied back.
pub(crate) struct CausalTask<D> {
    /// Configuration of the model, with its limits on tokens.
    config: AnyDecoder,
    /// Device of the rank.
    device: D,
    /// What is optimized.
    objective: Objective,
    /// The rewards of the micro-batches since the last step.
    rewards: Mutex<RewardSums>,
    /// What is generated after each evaluation.
    sampler: Option<Arc<TextSampler>>,
}

/// The losses of a batch of pairs.
struct PairLosses<B: Backend> {
    /// The sum over the pairs, `[1]`.
    sum: Tensor<B, 1>,
    /// The rewards, without a gradient.
    rewards: RewardSums,
}

impl<D> CausalTask<D> {
    /// Returns the task of a rank whose tensors are on `device`. `sampler` generates texts after
    /// each evaluation.
    pub(crate) fn new(
        config: AnyDecoder,
        device: D,
        objective: Objective,
        sampler: Option<Arc<TextSampler>>,
    ) -> Self {
        Self { config, device, objective, rewards: Mutex::default(), sampler }
    }

    /// Copies the batch to the device, with the label smoothing of the job.
    ///
    /// # Errors
    /// Returns [`InputError`] for a token outside the vocabulary or a sequence that is too long.
    fn batch<B: Backend<Device = D>>(
        &self,
        batch: &MicroBatch,
    ) -> Result<CausalBatch<B>, InputError> {
        let batch = causal_batch(batch, &self.config, &self.device)?;
        Ok(match self.objective {
            Objective::NextToken { label_smoothing } => batch.with_label_smoothing(label_smoothing),
            Objective::Preferences(_) => batch,
        })
    }

    /// Compares the completions of each pair.
    ///
    /// # Errors
    /// Returns an error if the batch does not fit the model, or if the objective is another one.
    fn compare<B: FusedOps<Device = D>>(
        &self,
        model: &Decoder<B>,
        PreferenceBatch { batch, reference }: &PreferenceBatch,
    ) -> Result<PairLosses<B>, BoxError> {
        let Objective::Preferences(DpoPlan { beta, loss_type }) = self.objective else {
            return Err("pairs have no next token; this is a bug: report it".into());
        };
        let sequences = self.batch(&batch.sequences)?;
        let (rows, pairs) = (batch.sequences.shape[0] / 2, batch.pairs.len());
        let vector = |values: Vec<f32>| {
            let len = values.len();
            Tensor::<B, 1>::from_data(TensorData::new(values, [len]), &self.device)
        };
        // Negated losses are log-probabilities.
        let ratios = -model.sequence_losses(&sequences) - vector(reference.of(batch)?);
        // Rewards are for the log, so they are read from the device without a gradient.
        let values: Vec<f64> = ratios.clone().into_data().iter::<f64>().collect();
        let mut rewards = RewardSums::default();
        for row in 0..pairs {
            // The implicit rewards of DPO, which TRL logs with every type of loss.
            rewards.add(beta * values[row], beta * values[rows + row]);
        }
        let scores = match loss_type {
            PreferenceLoss::Sigmoid => ratios,
            PreferenceLoss::Ipo => {
                // The missing rows of the last batch have no tokens.
                let tokens = sequences.tokens_of_sequences().map(|it| 1.0 / it.max(1) as f32);
                ratios * vector(tokens.collect())
            }
        };
        let differences = scores.clone().narrow(0, 0, rows) - scores.narrow(0, rows, rows);
        let losses = match loss_type {
            //= trl 1.16.0 trainer/dpo_trainer.py sigmoid
            PreferenceLoss::Sigmoid => -log_sigmoid(differences * beta),
            //= trl 1.16.0 trainer/dpo_trainer.py ipo
            PreferenceLoss::Ipo => (differences - 1.0 / (2.0 * beta)).powi_scalar(2),
        };
        // Missing pairs of the last batch have weight 0.
        let weights = (0..rows).map(|row| if row < pairs { 1.0 } else { 0.0 });
        Ok(PairLosses { sum: (losses * vector(weights.collect())).sum(), rewards })
    }
}

impl<B: FusedOps + OptimizerOps> Task<B, Decoder<Training<B>>> for CausalTask<B::Device> {
    type Batch = TokenBatch;

    /// Computes the mean loss over the positions that predict a token, or over the pairs, of shape
    /// `[1]`.
    fn loss(
        &self,
        model: &Decoder<Training<B>>,
        batch: &TokenBatch,
    ) -> Result<Tensor<Training<B>, 1>, BoxError> {
        match batch {
            TokenBatch::Sequences(batch) => Ok(model.loss(&self.batch(batch)?).mean()),
            TokenBatch::Pairs(batch) => {
                let PairLosses { sum, rewards } = self.compare(model, batch)?;
                self.rewards.lock().unwrap_or_else(PoisonError::into_inner).extend(rewards);
                // A rank without a pair in the last step has the sum 0, which must not become NaN.
                Ok(sum / batch.batch.pairs.len().max(1) as f64)
            }
        }
    }

    /// Computes the sum of the loss, and counts the tokens that are predicted, or sums the rewards.
    fn evaluate(
        &self,
        model: &Decoder<Zero<B>>,
        batch: &TokenBatch,
    ) -> Result<Evaluation, BoxError> {
        match batch {
            TokenBatch::Sequences(batch) => {
                // One tensor, so that a device is waited for once.
                let scores = model.scores(&self.batch(batch)?).into_data();
                // The summed loss, and the number of targets whose token is the most likely one.
                let [loss_sum, predicted] = [0, 1].map(|at| scores.iter::<f64>().nth(at));
                let answers = predicted.map(|count| Answers::Tokens { predicted: count as u64 });
                Ok(Evaluation { loss_sum: loss_sum.unwrap_or(f64::NAN), answers })
            }
            TokenBatch::Pairs(batch) => {
                let PairLosses { sum, rewards } = self.compare(model, batch)?;
                let answers = Some(Answers::Preferences(rewards));
                Ok(Evaluation { loss_sum: sum.into_scalar().elem::<f64>(), answers })
            }
        }
    }

    fn generate(
        &self,
        engine: &Engine<B, Decoder<Training<B>>>,
        interrupt: &Interrupt,
    ) -> Result<GeneratedTexts, BoxError> {
        match &self.sampler {
            Some(sampler) => sampler.generate(engine, interrupt),
            None => Ok(GeneratedTexts::All(Vec::new())),
        }
    }

    fn take_rewards(&self) -> Option<RewardSums> {
        // `None` leaves the columns of rewards out of the metrics.
        let Objective::Preferences(_) = self.objective else { return None };
        Some(std::mem::take(&mut *self.rewards.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

impl<B: FusedOps + OptimizerOps<Device: Sync>> ExampleTask<B, Decoder<Training<B>>>
    for CausalTask<B::Device>
{
    /// Returns sequences, or twice as many for pairs of them.
    fn example(&self, shape: BatchShape) -> TokenBatch {
        let [rows, length] = [shape.sequences, shape.length].map(|size| size as usize);
        let sequences = |rows: usize| {
            let vocabulary = self.config.limits().vocab_size.max(1);
            let ids: Vec<i32> = (0..rows * length).map(|at| spread(at, vocabulary)).collect();
            let (shape, documents) = ([rows, length], RowDocuments::Stream);
            // Every position has a label, so that no sequence has less work than a real one.
            MicroBatch { input_ids: ids.clone(), labels: ids, shape, samples: rows, documents }
        };
        match self.objective {
            Objective::NextToken { .. } => TokenBatch::Sequences(sequences(rows)),
            Objective::Preferences(_) => {
                let batch =
                    PairBatch { sequences: sequences(2 * rows), pairs: (0..rows).collect() };
                TokenBatch::Pairs(PreferenceBatch {
                    batch,
                    reference: ReferenceLogProbs::zeros(rows),
                })
            }
        }
    }
}

/// Returns a made-up token for position `at`. Tokens are spread over the vocabulary as in a text,
/// so that as many rows of an embedding get a gradient.
fn spread(at: usize, vocabulary: usize) -> i32 {
    // Knuth's multiplicative hash.
    ((at as u64).wrapping_mul(2_654_435_761) % vocabulary as u64) as i32
}
