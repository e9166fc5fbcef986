//! Data and a task for [`Net`], with faults that can be injected.

use burn::tensor::{ElementConversion, Tensor};
use burn_flex::Flex;
use deepburn::prelude::*;
use deepburn::{
    Batch, BatchSource, BoxError, Evaluation, EvaluationStream, NextStep, StepBatches, Task,
};
use serde_json::Value;

use crate::net::{Net, ROWS, batch};

/// The number of batches in an evaluation.
pub(crate) const EVALUATION_BATCHES: usize = 3;

/// A fault that is injected on one rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Fault {
    /// A panic between two layers of forward.
    Forward,
    /// A panic between forward and backward.
    BeforeBackward,
    /// The data of a step cannot be read.
    Data,
    /// The second batch of an evaluation cannot be read.
    EvaluationData,
    /// The loss of this rank is NaN.
    NotANumber,
}

/// A micro-batch, and the fault that its loss triggers.
pub(crate) struct TokenRows {
    tokens: [i64; ROWS],
    fault: Option<Fault>,
}

impl Batch for TokenRows {
    fn num_tokens(&self) -> usize {
        ROWS
    }

    fn num_targets(&self) -> usize {
        ROWS
    }
}

/// Seeded training data of one rank, and evaluation data that is always the same.
pub(crate) struct SeededRows {
    seed: u64,
    steps: u64,
    evaluates: bool,
    /// A fault and the step in which it occurs.
    fault: Option<(u64, Fault)>,
}

impl SeededRows {
    /// Creates training data without evaluation data.
    pub(crate) fn new(seed: u64, fault: Option<(u64, Fault)>) -> Self {
        Self { seed, steps: 0, evaluates: false, fault }
    }

    pub(crate) fn with_evaluation(self) -> Self {
        Self { evaluates: true, ..self }
    }

    /// Returns the fault of the current step.
    fn fault(&self) -> Option<Fault> {
        self.fault.filter(|(step, _)| *step == self.steps).map(|(_, fault)| fault)
    }
}

impl BatchSource<TokenRows> for SeededRows {
    fn next_step(&mut self, next: NextStep) -> Result<StepBatches<TokenRows>, BoxError> {
        self.steps += 1;
        let fault = self.fault();
        let take = |_| TokenRows { tokens: batch(&mut self.seed), fault };
        let taken: Vec<_> = (0..next.micro_batches).map(take).collect();
        match fault {
            // Like a file that fails after a read-ahead: the position has already advanced.
            Some(Fault::Data) => Err("the data source is dry".into()),
            _ => Ok(taken.into()),
        }
    }

    fn evaluation(&mut self) -> Result<Option<EvaluationStream<'_, TokenRows>>, BoxError> {
        let mut seed = 77;
        let fails = self.fault() == Some(Fault::EvaluationData);
        let batches = (0..EVALUATION_BATCHES).map(move |index| match index {
            1 if fails => Err("the evaluation data is dry".into()),
            _ => Ok(TokenRows { tokens: batch(&mut seed), fault: None }),
        });
        Ok(self.evaluates.then(|| Box::new(batches) as _))
    }

    fn position(&self) -> Value {
        self.seed.into()
    }

    fn seek(&mut self, position: &Value) -> Result<(), BoxError> {
        self.seed = position.as_u64().ok_or("no position")?;
        Ok(())
    }
}

/// The loss of [`Net`].
pub(crate) struct NetTask;

impl Task<Flex, Net<Training<Flex>>> for NetTask {
    type Batch = TokenRows;

    fn loss(
        &self,
        net: &Net<Training<Flex>>,
        batch: &TokenRows,
    ) -> Result<Tensor<Training<Flex>, 1>, BoxError> {
        let fault = batch.fault;
        let loss = net.loss(batch.tokens, || {
            if fault == Some(Fault::Forward) {
                panic!("a fault in a layer");
            }
        });
        match fault {
            Some(Fault::BeforeBackward) => panic!("a fault after forward"),
            Some(Fault::NotANumber) => Ok(loss.mul_scalar(f32::NAN)),
            _ => Ok(loss),
        }
    }

    fn evaluate(&self, net: &Net<Zero<Flex>>, batch: &TokenRows) -> Result<Evaluation, BoxError> {
        let mean: f64 = net.loss(batch.tokens, || {}).into_scalar().elem();
        Ok(Evaluation { loss_sum: mean * ROWS as f64, answers: None })
    }
}
