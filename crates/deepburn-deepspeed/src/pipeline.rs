//! Pipelines: each stage is saved as a model of its own, and each layer's weights in a file of
//! their own.
//!
//! DeepSpeed's `PipelineModule` is a list of layers, cut into stages. A stage has its tied layers
//! first, under the keys by which they are tied, and then its other layers by number:
//!
//! ```text
//! mp_rank_00   tied_modules.wte.weight, 1.weight, 2.ln_1.weight, …    layer_00, layer_01, layer_02
//! mp_rank_01   tied_modules.wte.weight, 3.ln_1.weight, …, 4.weight    layer_03, layer_04
//! ```
//!
//! At ZeRO stage 1 the stages list their parameters, and the files of layers are the copies in the
//! working type. At ZeRO stage 0 they have only the optimizer by number, so the stages follow from
//! the shapes of its arrays. Stages that hold the same tied layer must agree on its values. A layer
//! whose parameters are all frozen is known by its file alone. If that file is missing, the error
//! comes when the model is loaded.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::contents::Contents;
use crate::folder::StageFiles;
use crate::model_states_file::ModelStatesFile;
use crate::optim_states_file::OptimStatesFile;
use crate::rank_files::partitions;
use crate::stage_layers::layers_of_stages;
use crate::stored::{Assembled, Replica, SavedState, Stored, tie};
use crate::tensor::{NamedTensors, Segments};
use crate::{DeepSpeedError, Tensor, partitioned, replicated};

/// What the names of parameters in tied layers begin with; their key follows.
const TIED: &str = "tied_modules.";

/// The file of a layer.
struct LayerFile {
    /// The position among all layers, which the names of its parameters begin with.
    number: usize,
    /// The weights by their names in the layer, without buffers.
    weights: NamedTensors,
}

/// Reads a pipeline: its stages and the layers with weights, by number.
///
/// # Errors
/// Returns an error if the files are not from one save, if a layer's file is missing, or at ZeRO
/// stage 0 if the layers of a stage are not unique.
pub(crate) fn read(
    folder: &Path,
    stages: &[StageFiles],
    layers: &BTreeMap<usize, PathBuf>,
) -> Result<Assembled, DeepSpeedError> {
    let open = |stage: &StageFiles| ModelStatesFile::open(&stage.model, stages.len());
    let mut models: Vec<_> = stages.iter().map(open).collect::<Result<_, _>>()?;
    // A stage of a pipeline stores its weights in the files of its layers alone.
    if let Some(whole) = models.iter().find(|model| model.contents.root().get("module").is_some()) {
        let reason = "it has a whole model, but its folder also has files of a pipeline's layers";
        return Err(DeepSpeedError::mixed(whole.path(), reason));
    }
    if let Some(other) = models.iter().find(|model| model.summary != models[0].summary) {
        let reason =
            format!("its counters or its version differ from {}", models[0].path().display());
        return Err(DeepSpeedError::mixed(other.path(), reason));
    }
    let optimizers = models.iter().zip(stages);
    let optimizers = optimizers.map(|(model, stage)| partitions(folder, model, &stage.optim));
    let optimizers: Vec<_> = optimizers.collect::<Result<_, _>>()?;
    let (layers, buffers) = open_layers(layers, &models)?;
    let mut state = match optimizers.into_iter().collect::<Option<Vec<_>>>() {
        Some(ranks) => of_partitions(folder, &models, &ranks, &layers)?,
        None if models.iter().all(|model| model.groups.is_none()) => of_replicas(&models, &layers)?,
        None => {
            let reason = "some of the pipeline's stages are of ZeRO stage 0 and others are not";
            return Err(DeepSpeedError::mixed(models[0].path(), reason));
        }
    };
    // Trained parameters come first, each kind in the order of the layers.
    state.stored.sort_by_key(|stored| !stored.parameter.trainable);
    // There is a stage, because the folder has the model file of the first one.
    Ok((models.swap_remove(0).summary, state, buffers))
}

/// Opens the files of the layers, and divides their tensors into weights and float buffers, which
/// have their names in the pipeline.
fn open_layers(
    paths: &BTreeMap<usize, PathBuf>,
    models: &[ModelStatesFile],
) -> Result<(Vec<LayerFile>, NamedTensors), DeepSpeedError> {
    let mut buffer_names = HashSet::new();
    for model in models {
        buffer_names.extend(model.buffer_names()?);
    }
    let (mut layers, mut buffers) = (Vec::new(), Vec::new());
    for (&number, path) in paths {
        let contents = Contents::open(path)?;
        let mut weights = Vec::new();
        for (name, value) in contents.root().entries()? {
            let in_model = format!("{number}.{name}");
            match buffer_names.contains(in_model.as_str()) {
                false => weights.push((name, value.tensor()?)),
                // Integers, such as a batch norm's counter, are not read.
                true => buffers.extend(value.tensor().ok().map(|tensor| (in_model, tensor))),
            }
        }
        // Layers without weights, such as dropout, are in no stage's list.
        if !weights.is_empty() {
            layers.push(LayerFile { number, weights });
        }
    }
    Ok((layers, buffers))
}

/// Assembles ZeRO stage 1: `ranks` has the optimizer files of each pipeline stage.
fn of_partitions(
    folder: &Path,
    models: &[ModelStatesFile],
    ranks: &[Vec<OptimStatesFile>],
    layers: &[LayerFile],
) -> Result<SavedState, DeepSpeedError> {
    let states = models.iter().zip(ranks).map(|(model, ranks)| {
        let mut state = partitioned::assemble(model, ranks)?;
        tie(model, &mut state.stored)?;
        Ok(state)
    });
    let mut state = merge(models, states.collect::<Result<_, DeepSpeedError>>()?)?;
    add_working_copies(folder, &mut state.stored, layers)?;
    Ok(state)
}

/// Assembles ZeRO stage 0, whose stages have the optimizer by number.
///
/// # Errors
/// Returns [`DeepSpeedError::Unsupported`] if the shapes of the optimizer's arrays do not show
/// which layers a stage has.
fn of_replicas(
    models: &[ModelStatesFile],
    layers: &[LayerFile],
) -> Result<SavedState, DeepSpeedError> {
    let module = |layers: &mut dyn Iterator<Item = &LayerFile>| {
        let weights = layers.flat_map(|layer| {
            let named = |(name, tensor): &(String, Arc<Tensor>)| {
                (format!("{}.{name}", layer.number), tensor.clone())
            };
            layer.weights.iter().map(named)
        });
        weights.collect::<Vec<_>>()
    };
    if models.iter().all(|model| model.contents.root().get("optimizer").is_none()) {
        return replicated::assemble_of(&models[0], module(&mut layers.iter()));
    }
    let shapes = models.iter().map(replicated::optimizer_shapes);
    let shapes: Option<Vec<_>> = shapes.collect::<Result<_, _>>()?;
    let of_layer =
        |layer: &LayerFile| layer.weights.iter().map(|(_, it)| it.shape.clone()).collect();
    let of_layers: Vec<_> = layers.iter().map(of_layer).collect();
    let Some(stages) = shapes.and_then(|shapes| layers_of_stages(&of_layers, &shapes)) else {
        let found = "its optimizer does not show which layers this pipeline stage has (ZeRO stage 0 \
                     stores no names)";
        let remedy = "copy the files of all layers into one folder, or save it with zero_optimization.stage 1";
        return Err(DeepSpeedError::unsupported(models[0].path(), found, remedy));
    };
    let states = models.iter().zip(stages).map(|(model, stage)| {
        let module = module(&mut stage.iter().map(|at| &layers[*at]));
        replicated::assemble_of(model, module)
    });
    merge(models, states.collect::<Result<_, _>>()?)
}

/// Joins the stages. Of a tied parameter, the first stage's values are read, and the others' values
/// have to be equal.
///
/// # Errors
/// Returns [`DeepSpeedError::Mixed`] for a stage with another kind of optimizer or other counts.
fn merge(
    models: &[ModelStatesFile],
    states: Vec<SavedState>,
) -> Result<SavedState, DeepSpeedError> {
    let mut stages = models.iter().zip(states);
    let Some((first, mut merged)) = stages.next() else {
        unreachable!("a pipeline has a stage, because its folder has its model file")
    };
    for (model, state) in stages {
        let of = |it: &SavedState| (it.stage, it.moments.clone(), it.steps, it.loss_scale);
        if of(&state) != of(&merged) {
            let reason = format!(
                "its ZeRO stage, optimizer, step count and loss scale are {:?}, and {:?} in {}",
                of(&state),
                of(&merged),
                first.path().display()
            );
            return Err(DeepSpeedError::mixed(model.path(), reason));
        }
        for stored in state.stored {
            let name = &stored.parameter.name;
            match merged.stored.iter_mut().find(|it| it.parameter.name == *name) {
                Some(tied) => {
                    let Stored { weights, moments, .. } = stored;
                    tied.replicas.push(Replica { weights, moments });
                }
                None => merged.stored.push(stored),
            }
        }
    }
    Ok(merged)
}

/// Adds to each parameter of ZeRO stage 1 the copy in its layer's file, and the frozen parameters,
/// which have no other.
///
/// # Errors
/// Returns [`DeepSpeedError::Missing`] without a layer's file, and [`DeepSpeedError::Mixed`] if the
/// file has a tensor of another shape.
fn add_working_copies(
    folder: &Path,
    stored: &mut Vec<Stored>,
    layers: &[LayerFile],
) -> Result<(), DeepSpeedError> {
    let named = |layer: &LayerFile| {
        let weights = layer.weights.clone().into_iter();
        let number = layer.number;
        weights.map(move |(name, tensor)| ((number, name), tensor))
    };
    let mut left: BTreeMap<(usize, String), Arc<Tensor>> = layers.iter().flat_map(named).collect();
    let mut tied: BTreeMap<String, Vec<&mut Stored>> = BTreeMap::new();
    let mut untied = BTreeSet::new();
    for stored in stored.iter_mut() {
        let name = stored.parameter.name.clone();
        let in_tied = name.strip_prefix(TIED).and_then(|name| name.split_once('.'));
        if let Some((key, _)) = in_tied {
            tied.entry(key.to_owned()).or_default().push(stored);
            continue;
        }
        let in_layer = name.split_once('.').and_then(|(number, name)| {
            let number: usize = number.parse().ok()?;
            untied.insert(number);
            left.remove(&(number, name.to_owned()))
        });
        let tensor = in_layer.ok_or_else(|| without_layer(folder, &name))?;
        add_working_copy(stored, &tensor)?;
    }
    for (key, mut parameters) in tied {
        let prefix = format!("{TIED}{key}.");
        // The file of a tied layer has the number of the layer, and the stages know only its key,
        // so it is found by its names and shapes.
        let others = layers.iter().filter(|layer| !untied.contains(&layer.number));
        let of_key: Vec<_> = others.filter(|layer| holds(layer, &prefix, &parameters)).collect();
        for layer in of_key {
            left.retain(|(number, _), _| *number != layer.number);
            // A tied layer that is used several times may have several files, which are equal.
            for (name, tensor) in &layer.weights {
                let own = parameters.iter_mut().filter(|it| it.working.is_none());
                let own = own.filter(|it| it.parameter.name[prefix.len()..] == **name);
                own.into_iter().try_for_each(|own| add_working_copy(own, tensor))?;
            }
        }
    }
    if let Some(missed) = stored.iter().find(|it| it.working.is_none()) {
        return Err(without_layer(folder, &missed.parameter.name));
    }
    stored.extend(left.into_iter().map(|((number, name), tensor)| {
        let named = (format!("{number}.{name}"), tensor.shape.clone());
        Stored::new(named, false, Segments::whole(tensor))
    }));
    Ok(())
}

/// Returns the error for a parameter that no layer's file has.
fn without_layer(folder: &Path, name: &str) -> DeepSpeedError {
    let number = name.split_once('.').and_then(|(number, _)| number.parse::<usize>().ok());
    let file = number.map(|number| format!("layer_{number:02}-model_states.pt"));
    let reason = format!("there is no {name} in it; copy the files of all layers into one folder");
    DeepSpeedError::missing(&file.map_or(folder.to_owned(), |file| folder.join(file)), reason)
}

/// Returns true if a layer has exactly the parameters of a tied layer, whose names begin with
/// `prefix`.
fn holds(layer: &LayerFile, prefix: &str, tied: &[&mut Stored]) -> bool {
    layer.weights.len() == tied.len()
        && layer.weights.iter().all(|(name, tensor)| {
            let fits = |it: &&mut Stored| {
                let own = it.parameter.name.strip_prefix(prefix);
                own == Some(name) && it.parameter.shape == tensor.shape
            };
            tied.iter().any(fits)
        })
}

/// Adds the copy of a layer's file to a parameter.
fn add_working_copy(stored: &mut Stored, tensor: &Arc<Tensor>) -> Result<(), DeepSpeedError> {
    if tensor.shape != stored.parameter.shape {
        let reason = format!(
            "{} has shape {:?}, and {:?} in its pipeline stage",
            stored.parameter.name, tensor.shape, stored.parameter.shape
        );
        return Err(DeepSpeedError::mixed(tensor.path(), reason));
    }
    stored.working = Some(Segments::whole(tensor.clone()));
    Ok(())
}
