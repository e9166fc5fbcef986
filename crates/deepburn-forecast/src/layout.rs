//! The pipeline stages of a model, found by a dry run.
//!
//! A dry run of one forward pass has the order in which parameters are read, which is not the order
//! of a module's fields, and the operations and activations between the reads. Reads of one block
//! are a part that is not divided. A block that is read again later, such as a tied embedding, is a
//! part of its own at that place, so its parameters may have several stages:
//!
//! ```text
//!  reads     wte  wpe  h.0 h.0 h.0 …  h.1 …  ln_f  wte
//!  parts     wte  wpe  h.0            h.1    ln_f  wte
//!  stages    0    0    0              1      1     1        wte is on 0 and 1
//! ```

use std::ops::Range;

use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use deepburn_config::{Plan, StagePartition};
use deepburn_learner::{BoxError, initialize, pass_schedule};
use deepburn_meta::{Meta, MetaDevice};
use deepburn_pipeline::{Block, CutError, CutMethod, PipelineStep, cut};
use deepburn_zero::{Category, Group, Holders, PipelineLayout, Training, pipeline_units};

use crate::simulated_rank::{ForecastError, on_simulated_rank};

/// Divides a model into the pipeline stages of `plan`.
///
/// `build` creates the model, and `loss` computes the loss of one micro-batch, as for
/// [`forecast`](crate::forecast()). The model is neither changed nor annotated.
///
/// `memory` limits the bytes of a stage: model states and activations of the micro-batches that are
/// open at the same time.
///
/// # Errors
/// Returns an error if the model has fewer parts than stages or no cut fits into memory, the errors
/// of `build` or `loss`, or their panic.
pub fn pipeline_layout<M: AutodiffModule<Training<Meta>>>(
    plan: &Plan,
    build: impl FnOnce(&MetaDevice) -> Result<M, BoxError> + Send,
    loss: impl Fn(&M) -> Result<Tensor<Training<Meta>, 1>, BoxError> + Send,
    memory: Option<u64>,
) -> Result<PipelineLayout, ForecastError> {
    let stages = plan.mesh.pipeline_stages;
    let mut whole = plan.clone();
    // The model is measured as a whole, because the stages are what is to be found.
    (whole.mesh.pipeline_stages, whole.pipeline) = (1, None);
    let parts = on_simulated_rank(0, whole.mesh.world_size(), move |group| {
        let model = build(&MetaDevice).map_err(ForecastError::Loss)?;
        let mut engine = initialize(model, &whole, Group::new(group))?;
        engine.states().start_counting();
        let loss = engine.forward(loss)?.map_err(ForecastError::Loss)?;
        // The activations are counted while the loss exists, which keeps them for backward.
        let activations = engine.ledger().usage(Category::Activations).current;
        let reads = engine.states().parameter_reads();
        drop(loss);
        let paths = engine.parameters().iter().map(|parameter| parameter.path());
        let units = pipeline_units(paths.clone());
        let units = paths.map(str::to_owned).zip(units).collect::<Vec<_>>();
        let states = [Category::Parameters, Category::Optimizer]
            .map(|category| engine.ledger().usage(category).current as u64);
        let sizes = engine.parameters().iter().map(|it| it.numel()).collect::<Vec<_>>();
        Ok(Parts::new(&reads, activations, units, sizes, states))
    })?;
    let step = PipelineStep {
        schedule: pass_schedule(plan),
        micro_batches: plan.batch.gradient_accumulation_steps,
        memory_limit: memory,
    };
    Ok(parts.layout(stages, &method(plan), step)?)
}

/// Returns the method by which the plan divides the blocks.
fn method(plan: &Plan) -> CutMethod {
    match plan.pipeline.as_ref().map(|it| &it.partition) {
        None | Some(StagePartition::Best) => CutMethod::Cost,
        Some(StagePartition::Parameters) => CutMethod::Parameters,
        Some(StagePartition::Uniform) => CutMethod::Uniform,
        Some(StagePartition::Type(pattern)) => CutMethod::Type(pattern.regex().clone()),
    }
}

/// The parts of a model in the order of execution.
struct Parts {
    blocks: Vec<Block>,
    /// The parameters that each part reads, by index.
    reads: Vec<Vec<usize>>,
    /// The path of each parameter.
    paths: Vec<String>,
}

impl Parts {
    /// Joins reads of the same unit. `activations` are the bytes after the last read, and `states`
    /// the bytes of all parameters and of their optimizer states, which only the last part that
    /// reads a parameter has.
    fn new(
        reads: &[deepburn_zero::ParameterRead],
        activations: usize,
        units: Vec<(String, String)>,
        sizes: Vec<usize>,
        [values, states]: [u64; 2],
    ) -> Self {
        let (mut blocks, mut parts): (Vec<Block>, Vec<Vec<usize>>) = Default::default();
        let total = sizes.iter().sum::<usize>().max(1) as u64;
        // The product of bytes and elements exceeds 64 bits for models of a few billion parameters.
        let share = |bytes: u64, index: usize| {
            (u128::from(bytes) * sizes[index] as u128 / u128::from(total)) as u64
        };
        let mut before = 0;
        let index_of = |path: &str| units.iter().position(|(known, _)| known == path);
        for read in reads {
            let Some(index) = index_of(&read.path) else { continue };
            let name = &units[index].1;
            if blocks.last().is_none_or(|block| block.name != *name) {
                if let Some(last) = blocks.last_mut() {
                    last.activation_bytes = read.activations.saturating_sub(before) as u64;
                }
                before = read.activations;
                blocks.push(Block { name: name.clone(), ..Block::default() });
                parts.push(Vec::new());
            }
            let ([earlier @ .., block], [parts_before @ .., part]) =
                (&mut blocks[..], &mut parts[..])
            else {
                continue;
            };
            block.forward_operations += read.operations;
            // The gradients of both operands take as many operations each.
            block.backward_operations += 2 * read.operations;
            if !part.contains(&index) {
                part.push(index);
                block.parameters += sizes[index] as u64;
                block.state_bytes += share(values, index) + share(states, index);
                let owner = parts_before.iter().rposition(|part| part.contains(&index));
                if let Some(owner) = owner {
                    earlier[owner].state_bytes -= share(states, index);
                }
            }
        }
        if let Some(last) = blocks.last_mut() {
            last.activation_bytes = activations.saturating_sub(before) as u64;
        }
        let paths = units.into_iter().map(|(path, _)| path).collect();
        Self { blocks, reads: parts, paths }
    }

    /// Divides the parts into stages, and returns the stages of each parameter, the last of which
    /// owns it. A parameter that forward does not read goes to the stage of the parameter before
    /// it.
    fn layout(
        self,
        stages: usize,
        method: &CutMethod,
        step: PipelineStep,
    ) -> Result<PipelineLayout, CutError> {
        let cut = cut(&self.blocks, stages, method, step)?;
        let mut cut: Vec<_> = cut.into_iter().map(|it| it.blocks).collect();
        // A cut that was asked for, or that has to fit into memory, stays as it is.
        if matches!(method, CutMethod::Cost) && step.memory_limit.is_none() {
            cut = self.entered_by_own_parameters(cut);
        }
        let mut homes: Vec<Vec<usize>> = vec![Vec::new(); self.paths.len()];
        for (stage, blocks) in cut.iter().enumerate() {
            for index in self.reads[blocks.clone()].iter().flatten() {
                homes[*index].push(stage);
            }
        }
        let operations = |block: &Block| block.forward_operations + block.backward_operations;
        let total = self.blocks.iter().map(operations).sum::<u64>().max(1) as f64;
        let describe = |blocks: &Range<usize>| {
            let blocks = &self.blocks[blocks.clone()];
            let share = 100.0 * blocks.iter().map(operations).sum::<u64>() as f64 / total;
            let [first, last] =
                [blocks.first(), blocks.last()].map(|it| it.map_or("", |it| &it.name));
            match blocks.len() {
                1 => format!("{first}, {share:.0} % of the operations"),
                _ => format!("{first} to {last}, {share:.0} % of the operations"),
            }
        };
        let descriptions = cut.iter().map(describe).collect();
        let mut last = 0;
        let placed = self.paths.into_iter().zip(homes).map(|(path, homes)| {
            last = homes.last().copied().unwrap_or(last);
            (path, Holders::of(homes.into_iter().chain([last])))
        });
        Ok(PipelineLayout::new(stages, placed).described(descriptions))
    }

    /// Gives each stage a first part with a parameter that the stage before does not have, if that
    /// stage has a part to give.
    ///
    /// An op runs on the stage of its input if that stage has the parameters, too. With two stages,
    /// an output layer that is tied to the embedding would not run on the last stage if it were the
    /// only part there. With the norm before it, it does.
    fn entered_by_own_parameters(&self, mut cut: Vec<Range<usize>>) -> Vec<Range<usize>> {
        for stage in 1..cut.len() {
            let shared = |cut: &[Range<usize>]| {
                let before: Vec<_> = self.reads[cut[stage - 1].clone()].iter().flatten().collect();
                self.reads[cut[stage].start].iter().all(|index| before.contains(&index))
            };
            while cut[stage - 1].len() > 1 && shared(&cut) {
                cut[stage - 1].end -= 1;
                cut[stage].start -= 1;
            }
        }
        cut
    }
}

#[cfg(test)]
mod tests {
    use deepburn_pipeline::PassSchedule;
    use deepburn_zero::ParameterRead;

    use super::*;

    /// Parts that read these parameters and have these operations.
    fn parts(reads: &[&[usize]], operations: &[u64]) -> Parts {
        let block = |(index, operations): (usize, &u64)| Block {
            name: format!("part {index}"),
            forward_operations: *operations,
            ..Block::default()
        };
        let count = reads.iter().copied().flatten().max().unwrap() + 1;
        Parts {
            blocks: operations.iter().enumerate().map(block).collect(),
            reads: reads.iter().map(|part| part.to_vec()).collect(),
            paths: (0..count).map(|index| index.to_string()).collect(),
        }
    }

    fn homes(parts: Parts, stages: usize) -> Vec<Vec<usize>> {
        let count = parts.paths.len();
        let schedule = PassSchedule::OneForwardOneBackward;
        let step = PipelineStep { schedule, micro_batches: 4, memory_limit: None };
        let layout = parts.layout(stages, &CutMethod::Cost, step).unwrap();
        let homes = |index: usize| layout.homes(&index.to_string()).unwrap().iter().collect();
        (0..count).map(homes).collect()
    }

    /// The embedding and the output layer of Llama 3 (8B), and the other parameters as one.
    #[test]
    fn states_of_large_models_are_counted() {
        let sizes = vec![128_256 * 4096, 7_000_000_000, 128_256 * 4096];
        let names = ["embed", "blocks", "head"];
        let read =
            |name| ParameterRead { path: format!("{name}.weight"), operations: 1, activations: 0 };
        let units = names.map(|name| (format!("{name}.weight"), name.to_owned()));
        let total = sizes.iter().sum::<usize>() as u64;
        let states = [4 * total, 12 * total];
        let parts = Parts::new(&names.map(read), 0, units.to_vec(), sizes.clone(), states);
        let found = parts.blocks.iter().map(|block| block.state_bytes);
        assert!(found.eq(sizes.iter().map(|size| 16 * *size as u64)));
    }

    /// Parameter 0 is the embedding and the output layer, 3 the norm before it.
    #[test]
    fn a_tied_output_layer_brings_its_norm_to_the_last_stage() {
        let (reads, operations) = ([&[0][..], &[1], &[2], &[3], &[0]], [0, 3, 3, 0, 9]);
        let two = homes(parts(&reads, &operations), 2);
        assert_eq!(two, [vec![0, 1], vec![0], vec![0], vec![1]]);
        // The stage before the last one does not have the embedding.
        let three = homes(parts(&reads, &operations), 3);
        assert_eq!((three[0].as_slice(), three[3].len()), (&[0, 2][..], 1));
        // Without a norm, the last layer comes along.
        let two = homes(parts(&[&[0], &[1], &[2], &[0]], &[0, 3, 3, 9]), 2);
        assert_eq!(two, [vec![0, 1], vec![0], vec![1]]);
        // The first stage keeps its only part.
        let two = homes(parts(&[&[0], &[0]], &[1, 1]), 2);
        assert_eq!(two, [vec![0, 1]]);
    }
}
