//! The parameters of a decoder: paths in the module, paths for users, names in files, shapes and
//! initial values.
//!
//! All decoders have one module, whose fields are named by what they do. Users know the parameters
//! by the names of the files: `h.0.attn.c_attn.weight` in GPT-2, `layers.0.self_attn.q_proj.weight`
//! in Llama. [`Paths`] maps the first kind of path to the second.

use std::sync::Arc;

use deepburn_lora::{ADAPTER_BIAS, Adapter, MAGNITUDE, ModelModule, ModuleKind, TOKEN_ROWS};
use deepburn_weights::{Component, Composition, InitialValues, Origin, Weight, WeightMap};

use super::parts::{
    AttentionInputs, DecoderParts, FeedForwardInputs, LayerPart, NormPart, ProjectionLayout,
    ProjectionPart,
};
use crate::norm::NormKind;
use crate::weights::Paths;

/// A parameter.
struct DecoderParameter {
    /// The path in the module.
    in_module: String,
    /// The parameter, under its public path.
    weight: Weight,
    /// What its module computes.
    kind: ModuleKind,
}

impl DecoderParts {
    /// Returns the map of all parameters, in the order in which the module holds them. Names in
    /// files may omit the prefix. A tied head is listed with the embedding's values, because files
    /// may contain a copy.
    pub(crate) fn weight_map(&self) -> WeightMap {
        let weights = self.parameters().into_iter().map(|parameter| parameter.weight).collect();
        let map = WeightMap::new(weights).expect("each parameter has tensors of its own");
        map.with_optional_prefix(self.files.prefix).with_ignored(self.files.ignored.iter().copied())
    }

    /// Returns the public paths of the parameters.
    pub(crate) fn paths(&self) -> Paths {
        let all = self.parameters().into_iter();
        Arc::new(all.map(|it| (it.in_module, it.weight.path().to_owned())).collect())
    }

    /// Returns the public paths of the parameters of an adapted model.
    pub(crate) fn adapted_paths(&self, adapter: &Adapter) -> Paths {
        let mut paths = (*self.paths()).clone();
        for DecoderParameter { in_module, weight, kind } in self.parameters() {
            let modules =
                in_module.strip_suffix(".weight").zip(weight.path().strip_suffix(".weight"));
            let Some((own, public)) = modules else { continue };
            if adapter.trained_tokens(public).is_some() {
                paths.insert(format!("{own}.tokens.rows"), format!("{public}.{TOKEN_ROWS}"));
            }
            if adapter.module(public).is_none() {
                continue;
            }
            let [a, b] = kind.factor_names();
            let leaves = [["a", a], ["b", b], ["bias", ADAPTER_BIAS], ["magnitude", MAGNITUDE]];
            // Paths of fields that an adapter lacks do no harm: they are never looked up.
            for [field, leaf] in leaves {
                paths.insert(format!("{own}.adapter.{field}"), format!("{public}.{leaf}"));
            }
        }
        Arc::new(paths)
    }

    /// Returns the modules that an adapter may change, in the order in which the module holds them.
    pub(crate) fn modules(&self) -> Vec<ModelModule> {
        let parameters = self.parameters().into_iter();
        let module = |DecoderParameter { weight, kind, .. }: DecoderParameter| {
            let path = weight.path().strip_suffix(".weight")?.to_owned();
            let name = weight.stored_name().strip_suffix(".weight")?.to_owned();
            Some(ModelModule { path, name, kind })
        };
        parameters.filter_map(module).collect()
    }

    /// Returns the names of the modules that PEFT adapts by default: of queries and values, or of
    /// the joint projection. PEFT has no default for Phi-3, and adapts the joint projection of
    /// GPT-2.
    pub(crate) fn default_targets(&self) -> Vec<&'static str> {
        let last = |part: ProjectionPart| part.name.rsplit('.').next().unwrap_or(part.name);
        match self.layers.first().map(|layer| layer.attention.inputs) {
            Some(AttentionInputs::Joint(joint)) => vec![last(joint)],
            Some(AttentionInputs::Separate([queries, _, values])) => {
                vec![last(queries), last(values)]
            }
            None => Vec::new(),
        }
    }

    /// Returns the parameters, in the order in which the module holds them.
    fn parameters(&self) -> Vec<DecoderParameter> {
        let (width, std) = (self.width, self.std);
        let mut list =
            List { parts: self, module: String::new(), path: String::new(), found: vec![] };
        list.table("embed_tokens", self.embedding.name, [self.vocab_size, width], std);
        if let Some(name) = self.learned_positions {
            list.table("embed_positions", name, [self.max_len, width], std);
        }
        for (number, layer) in self.layers.iter().enumerate() {
            list.module = format!("layers.{number}.");
            list.path = format!("{}.{number}.", self.layers_name);
            list.layer(layer);
        }
        (list.module, list.path) = (String::new(), String::new());
        list.norm("norm", &self.norm, width);
        let mut found = list.found;
        let head = self.head_path();
        // In files, the head has no prefix.
        let composition = Composition::whole(&head, &[self.vocab_size, width]);
        let origin = match self.head.is_tied {
            true => Origin::Tied { to: self.embedding_path() },
            false => Origin::Fresh(InitialValues::Normal { std }),
        };
        let weight = Weight::new(head, composition).with_origin(origin);
        let kind = ModuleKind::Head { is_tied: self.head.is_tied };
        found.push(DecoderParameter { in_module: "head.weight".into(), weight, kind });
        found
    }
}

/// A list of parameters in the making.
struct List<'a> {
    parts: &'a DecoderParts,
    /// The start of the paths in the module.
    module: String,
    /// The start of the public paths.
    path: String,
    found: Vec<DecoderParameter>,
}

impl List<'_> {
    fn layer(&mut self, layer: &LayerPart) {
        let (width, attention, feed) = (self.parts.width, &layer.attention, &layer.feed_forward);
        let (std, residual_std) = (self.parts.std, self.parts.residual_std);
        // In the order of the fields of `Layer`, `Attention` and `FeedForward`.
        self.norm("attention_norm", &layer.attention_norm, width);
        let columns = attention.columns();
        let head = attention.head_width;
        match attention.inputs {
            AttentionInputs::Joint(joint) => {
                let shape = [width, columns.iter().sum()];
                self.projection("attention.inputs.Joint", joint, shape, std);
            }
            AttentionInputs::Separate(parts) => {
                let names = ["queries", "keys", "values"];
                for ((name, part), columns) in names.iter().zip(parts).zip(columns) {
                    let module = format!("attention.inputs.Separate.{name}");
                    self.projection(&module, part, [width, columns], std);
                }
            }
        }
        if let Some([queries, keys]) = &attention.head_norms {
            self.norm("attention.query_norm", queries, head);
            self.norm("attention.key_norm", keys, head);
        }
        self.projection("attention.output", attention.output, [columns[0], width], residual_std);
        self.optional_norm("attention_output_norm", layer.attention_output_norm.as_ref());
        self.norm("feed_forward_norm", &layer.feed_forward_norm, width);
        let inner = feed.inner;
        match feed.inputs {
            FeedForwardInputs::Plain(up) => {
                self.projection("feed_forward.inputs.Plain", up, [width, inner], std);
            }
            FeedForwardInputs::Gated([gate, up]) => {
                self.projection("feed_forward.inputs.Gated.gate", gate, [width, inner], std);
                self.projection("feed_forward.inputs.Gated.up", up, [width, inner], std);
            }
            FeedForwardInputs::GatedJoint(joint) => {
                self.projection("feed_forward.inputs.GatedJoint", joint, [width, 2 * inner], std);
            }
        }
        self.projection("feed_forward.output", feed.output, [inner, width], residual_std);
        self.optional_norm("feed_forward_output_norm", layer.feed_forward_output_norm.as_ref());
    }

    /// Adds an embedding table.
    fn table(&mut self, module: &str, name: &str, shape: [usize; 2], std: f64) {
        let kind = match module {
            "embed_tokens" => ModuleKind::Embedding { rows: shape[0], width: shape[1] },
            _ => ModuleKind::Other,
        };
        let normal = InitialValues::Normal { std };
        self.add_composed(module, name, "weight", normal, kind, |stored| {
            Composition::whole(stored, &shape)
        });
    }

    fn optional_norm(&mut self, module: &str, norm: Option<&NormPart>) {
        if let Some(norm) = norm {
            self.norm(module, norm, self.parts.width);
        }
    }

    fn norm(&mut self, module: &str, norm: &NormPart, width: usize) {
        let ones = match norm.kind {
            NormKind::Layer { .. } | NormKind::Rms { .. } => InitialValues::Ones,
            // 1 is added to the weight.
            NormKind::RmsPlusOne { .. } => InitialValues::Zeros,
        };
        self.add(module, norm.name, "weight", &[width], ones);
        if norm.kind.has_bias() {
            self.add(module, norm.name, "bias", &[width], InitialValues::Zeros);
        }
    }

    /// Adds a projection, whose weight is `[in, out]` in the module.
    fn projection(&mut self, module: &str, part: ProjectionPart, shape: [usize; 2], std: f64) {
        let normal = InitialValues::Normal { std };
        let kind = ModuleKind::Linear { inputs: shape[0], outputs: shape[1] };
        let layout = self.parts.files.projections;
        self.add_composed(module, part.name, "weight", normal, kind, |name| match layout {
            ProjectionLayout::InOut => Composition::whole(name, &shape),
            ProjectionLayout::OutIn => {
                let component = Component::whole(name, &[shape[1], shape[0]]).transposed();
                Composition::join(0, vec![component]).expect("there is one component")
            }
        });
        if part.has_bias {
            self.add(module, part.name, "bias", &shape[1..], InitialValues::Zeros);
        }
    }

    /// Adds a parameter that is stored as in the module, and that has no adapter.
    fn add(
        &mut self,
        module: &str,
        name: &str,
        leaf: &str,
        shape: &[usize],
        initial: InitialValues,
    ) {
        self.add_composed(module, name, leaf, initial, ModuleKind::Other, |stored| {
            Composition::whole(stored, shape)
        });
    }

    /// Adds a parameter that is made of the tensor whose name is given to `composition`.
    fn add_composed(
        &mut self,
        module: &str,
        name: &str,
        leaf: &str,
        initial: InitialValues,
        kind: ModuleKind,
        composition: impl FnOnce(String) -> Composition,
    ) {
        let path = format!("{}{name}.{leaf}", self.path);
        let composition = composition(format!("{}{path}", self.parts.files.prefix));
        let weight = Weight::new(path, composition).with_origin(Origin::Fresh(initial));
        let in_module = format!("{}{module}.{leaf}", self.module);
        self.found.push(DecoderParameter { in_module, weight, kind });
    }
}
