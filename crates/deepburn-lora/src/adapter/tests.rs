use super::*;

/// Two layers, a norm, an embedding and a head.
fn modules(is_tied: bool) -> Vec<ModelModule> {
    let module = |path: &str, prefix: &str, kind| ModelModule {
        path: path.into(),
        name: format!("{prefix}{path}"),
        kind,
    };
    let mut modules =
        vec![module("embed_tokens", "model.", ModuleKind::Embedding { rows: 9, width: 4 })];
    for layer in 0..2 {
        let linear = |leaf: &str, inputs, outputs| {
            let kind = ModuleKind::Linear { inputs, outputs };
            module(&format!("layers.{layer}.{leaf}"), "model.", kind)
        };
        modules.extend([linear("attn.q_proj", 4, 6), linear("mlp.up_proj", 4, 5)]);
    }
    modules.push(module("norm", "model.", ModuleKind::Other));
    modules.push(module("lm_head", "", ModuleKind::Head { is_tied }));
    modules
}

fn base(is_tied: bool) -> WeightMap {
    let mut weights = Vec::new();
    for ModelModule { path, name, kind } in modules(is_tied) {
        let path = format!("{path}.weight");
        let stored = format!("{name}.weight");
        let weight = |composition| Weight::new(path.clone(), composition);
        weights.push(match kind {
            ModuleKind::Linear { inputs, outputs } => {
                let component = Component::whole(stored, &[outputs, inputs]).transposed();
                weight(Composition::join(0, vec![component]).unwrap())
            }
            ModuleKind::Head { is_tied: true, .. } => {
                let origin = Origin::Tied { to: "embed_tokens.weight".into() };
                weight(Composition::whole(stored, &[9, 4])).with_origin(origin)
            }
            ModuleKind::Other => weight(Composition::whole(stored, &[4])),
            _ => weight(Composition::whole(stored, &[9, 4])),
        });
        if name.ends_with("q_proj") {
            let bias = Composition::whole(format!("{name}.bias"), &[6]);
            weights.push(Weight::new(path.replace("weight", "bias"), bias));
        }
    }
    WeightMap::new(weights).unwrap()
}

fn adapter(is_tied: bool, fields: Value) -> Result<Adapter, String> {
    let config = LoraConfig::of_job(fields.as_object().unwrap()).unwrap();
    Adapter::new(config, &modules(is_tied), &["q_proj"], &base(is_tied))
        .map_err(|error| error.to_string())
}

/// Returns the paths of the adapted modules.
fn adapted(fields: Value) -> Vec<String> {
    let adapter = adapter(false, fields).unwrap();
    let paths = modules(false).into_iter().map(|module| module.path);
    paths.filter(|path| adapter.module(path).is_some()).collect()
}

//= peft 0.21.2 tuners/tuners_utils.py _maybe_include_all_linear_layers
#[test]
fn modules_are_selected_as_in_peft() {
    let (q, up) = (["layers.0.attn.q_proj", "layers.1.attn.q_proj"], "layers.1.mlp.up_proj");
    assert_eq!(adapted(json!({})), q);
    assert_eq!(adapted(json!({"target_modules": ["q_proj"]})), q);
    assert_eq!(adapted(json!({"target_modules": "all-linear"})).len(), 4);
    assert_eq!(adapted(json!({"target_modules": r".*\.1\..*up_proj"})), [up]);
    let fields = json!({"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1],
                        "layers_pattern": "layers", "exclude_modules": ["attn.q_proj"]});
    assert_eq!(adapted(fields), [up]);
    let fields = json!({"target_modules": ["q_proj"], "layers_to_transform": [7]});
    let error = adapter(false, fields).unwrap_err();
    assert!(error.contains("layers_to_transform") && error.contains("[7]"), "{error}");
    // PEFT refuses an expression that matches `model.layers.1.mlp`, too.
    let names = |expression: &str| {
        let adapter = adapter(false, json!({"target_modules": expression})).unwrap();
        adapter.file_fields()["target_modules"].clone()
    };
    assert_eq!(
        names(".*mlp.*"),
        json!(["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"])
    );
    assert_eq!(names(r".*mlp\..*"), names(".*mlp.*"));
    assert_eq!(names(r".*mlp\.(up|down)_proj"), json!(r".*mlp\.(up|down)_proj"));
    // A whole name is adapted whatever its layer.
    let fields =
        json!({"target_modules": ["model.layers.0.attn.q_proj"], "layers_to_transform": 1});
    assert_eq!(adapted(fields), [q[0]]);
}

//= peft 0.21.2 tuners/lora/layer.py reset_lora_parameters
#[test]
fn factors_have_the_initial_values_of_peft() {
    use InitialValues::{Normal, Uniform, Zeros};
    // Four inputs, rank 2. Tables of 9 rows are looked up, so their first factor is the one of the
    // rows.
    for (fields, linear, table) in [
        (json!({}), [Uniform { bound: 0.5 }, Zeros], [Zeros, Normal { std: 1.0 }]),
        (
            json!({"init_lora_weights": "gaussian"}),
            [Normal { std: 0.5 }, Zeros],
            [Zeros, Normal { std: 1.0 }],
        ),
        (
            json!({"init_lora_weights": false}),
            [Uniform { bound: 0.5 }, Uniform { bound: 1.0 / 2_f64.sqrt() }],
            [Normal { std: 1.0 }, Normal { std: 1.0 }],
        ),
    ] {
        let mut fields = fields;
        fields["r"] = json!(2);
        fields["target_modules"] = json!(["up_proj", "embed_tokens"]);
        let extended = adapter(false, fields).unwrap().extended(&base(false)).unwrap();
        let initial = |path: &str| match extended.get(path).unwrap().origin() {
            Origin::Fresh(initial) => *initial,
            other => panic!("{path}: {other:?}"),
        };
        let of = |module: &str, leaves: [&str; 2]| {
            leaves.map(|leaf| initial(&format!("{module}.{leaf}")))
        };
        let kind = |path: &str| modules(false).into_iter().find(|it| it.path == path).unwrap().kind;
        let [up, tokens] = ["layers.1.mlp.up_proj", "embed_tokens"];
        assert_eq!(of(up, kind(up).factor_names()), linear);
        assert_eq!(of(tokens, kind(tokens).factor_names()), table);
    }
}

#[test]
fn adapters_are_compared_by_what_they_select() {
    let of = |fields| adapter(true, fields).unwrap();
    let q = of(json!({"target_modules": ["q_proj"]}));
    for same in [
        json!({}),
        json!({"target_modules": r".*q_proj"}),
        json!({"target_modules": ["layers.1.attn.q_proj", "layers.0.attn.q_proj"]}),
        json!({"rank_pattern": {"q_proj": 8}, "r": 4, "lora_alpha": 8}),
        json!({"init_lora_weights": "gaussian"}),
    ] {
        assert!(q.computes_as(&of(same.clone())), "{same}");
    }
    for other in [
        json!({"target_modules": "all-linear"}),
        json!({"lora_alpha": 16}),
        json!({"lora_dropout": 0.1}),
        json!({"use_dora": true}),
        json!({"trainable_token_indices": [3]}),
        json!({"modules_to_save": ["norm"]}),
    ] {
        assert!(!q.computes_as(&of(other.clone())), "{other}");
    }
}

//= peft 0.21.2 tuners/trainable_tokens/layer.py TrainableTokensLayer
#[test]
fn rows_of_tokens_are_parameters_of_their_own() {
    let rows = |is_tied, fields: Value| {
        let adapter = adapter(is_tied, json!({"trainable_token_indices": fields}))?;
        let map = adapter.extended(&base(is_tied)).unwrap();
        let file = adapter.file_map(&map).unwrap();
        let own = file.parameters().filter(|weight| weight.path().contains("token_adapter"));
        Ok::<_, String>(own.map(|it| (it.stored_name(), it.shape())).collect::<Vec<_>>())
    };
    let name = |module: &str| format!("base_model.model.{module}.{TOKEN_ROWS}");
    let embedding = || (name("model.embed_tokens"), vec![2, 4]);
    let head = || (name("lm_head"), vec![1, 4]);
    // A tied head has the rows of the embedding, also if both are named.
    for fields in [json!([7, 2]), json!({"lm_head": [7, 2], "embed_tokens": [7, 2]})] {
        assert_eq!(rows(true, fields.clone()), Ok(vec![embedding()]), "{fields}");
    }
    assert_eq!(rows(false, json!([7, 2])), Ok(vec![embedding()]));
    let both = json!({"lm_head": [3], "embed_tokens": [7, 2]});
    assert_eq!(rows(false, both.clone()), Ok(vec![embedding(), head()]));
    for (is_tied, fields, part) in [
        (true, both, "`lm_head` is tied to the embedding"),
        (true, json!({"lm_head": [3]}), "`lm_head` is tied to the embedding"),
        (false, json!([9]), "token 9 has no row in `model.embed_tokens`, which has 9"),
        (false, json!({"wte": [1]}), "no module is called `wte`"),
        (false, json!({"norm": [1]}), "`model.norm` is neither the token embedding nor"),
    ] {
        let error = rows(is_tied, fields).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
    let with = |is_tied, more: Value| {
        let mut fields = json!({"trainable_token_indices": [1]});
        fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        adapter(is_tied, fields).map(|_| ())
    };
    assert_eq!(with(false, json!({"modules_to_save": ["lm_head"]})), Ok(()));
    for (is_tied, more, part) in [
        (false, json!({"target_modules": ["embed_tokens"]}), "remove it from target_modules"),
        (false, json!({"modules_to_save": ["embed_tokens"]}), "use one of the two fields"),
        (true, json!({"modules_to_save": ["lm_head"]}), "use one of the two fields"),
    ] {
        let error = with(is_tied, more).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn selections_that_mean_nothing_are_refused() {
    for (is_tied, fields, expected) in [
        (
            false,
            json!({"target_modules": ["q_proj", "w_proj"]}),
            "no module is called `w_proj`; the model has \
            embed_tokens, q_proj, up_proj, norm, lm_head",
        ),
        (
            false,
            json!({"target_modules": "w"}),
            "no module of the model is selected by the regular expression",
        ),
        (
            true,
            json!({"target_modules": ["embed_tokens"], "ensure_weight_tying": true}),
            "with modules_to_save",
        ),
        (false, json!({"target_modules": ["norm"]}), "neither a linear layer nor an embedding"),
        (true, json!({"target_modules": ["lm_head"]}), "is the output projection"),
        (
            false,
            json!({"target_modules": ["embed_tokens"], "use_dora": true}),
            "linear layers only",
        ),
        (false, json!({"modules_to_save": ["heads"]}), "no module is called `heads`"),
        (false, json!({"modules_to_save": ["q_proj"]}), "is adapted"),
        (
            false,
            json!({"modules_to_save": ["proj"], "target_modules": ["up_proj"]}),
            "`model.layers.0.mlp.up_proj`, whose name ends with `proj`, is adapted",
        ),
        (
            false,
            json!({"modules_to_save": ["mlp"]}),
            "`mlp` selects `model.layers.0.mlp`, which contains other modules; name these, such as up_proj",
        ),
    ] {
        let error = adapter(is_tied, fields.clone()).unwrap_err();
        assert!(error.contains(expected), "{fields}: {error}");
    }
}

//= peft 0.21.2 utils/save_and_load.py get_peft_model_state_dict
#[test]
fn the_map_has_the_adapters_behind_their_modules() {
    let fields =
        json!({"r": 2, "use_dora": true, "rank_pattern": {"layers.1.*": 3}, "bias": "lora_only"});
    let adapter = adapter(false, fields).unwrap();
    let map = adapter.extended(&base(false)).unwrap();
    let paths: Vec<_> = map.weights().iter().map(|weight| weight.path()).collect();
    let at = paths.iter().position(|path| *path == "layers.0.attn.q_proj.bias").unwrap();
    let own = ["lora_A.weight", "lora_B.weight", "lora_magnitude_vector"];
    let own = own.map(|leaf| format!("layers.0.attn.q_proj.{leaf}"));
    assert_eq!(paths[at + 1..at + 4], own);
    assert_eq!(map.get(&own[0]).unwrap().shape(), [4, 2]);
    assert_eq!(map.get("layers.1.attn.q_proj.lora_B.weight").unwrap().shape(), [3, 6]);
    let frozen: Vec<_> = map.weights().iter().filter(|it| *it.origin() == Origin::Frozen).collect();
    assert_eq!(frozen.len(), 7);
    assert!(frozen.iter().all(|weight| !adapter.trains(weight.path())));
    assert!(adapter.trains("layers.1.attn.q_proj.bias") && !adapter.trains("norm.weight"));
    // Stored as in PyTorch, under PEFT's names.
    let file = adapter.file_map(&map).unwrap();
    let tensors: Vec<_> = file.stored_tensors().iter().map(|it| (it.name(), it.shape())).collect();
    let prefix = "base_model.model.model.layers.1.attn.q_proj";
    for (name, shape) in [
        (format!("{prefix}.lora_A.weight"), &[3, 4][..]),
        (format!("{prefix}.lora_B.weight"), &[6, 3]),
        (format!("{prefix}.lora_magnitude_vector"), &[6]),
        (format!("{prefix}.base_layer.bias"), &[6]),
    ] {
        assert!(tensors.contains(&(&name, shape)), "{name}: {tensors:?}");
    }
    assert_eq!(tensors.len(), 8);
}

//= peft 0.21.2 utils/other.py _set_trainable
#[test]
fn names_of_saved_modules_are_ends_of_texts() {
    let saved = |names: &[&str]| {
        let adapter = adapter(false, json!({"modules_to_save": names})).unwrap();
        let all = modules(false).into_iter().map(|module| module.name);
        let trained = |name: &String| {
            let path = name.strip_prefix("model.").unwrap_or(name);
            adapter.trains(&format!("{path}.weight"))
        };
        all.filter(trained).collect::<Vec<_>>()
    };
    let both = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"];
    assert_eq!(saved(&["p_proj"]), both);
    assert_eq!(saved(&["1.mlp.up_proj"]), both[1..]);
    assert_eq!(saved(&["tokens", "orm"]), ["model.embed_tokens", "model.norm"]);
}

#[test]
fn settings_that_select_nothing_are_named() {
    let fields = json!({"layers_to_transform": [1, 2, 7], "exclude_modules": ["w"],
                        "target_modules": ["q_proj"], "rank_pattern": {"up_proj": 2}});
    let unused = adapter(false, fields).unwrap().unused_settings(&modules(false)).unwrap();
    assert_eq!(
        unused,
        [
            "rank_pattern.up_proj",
            "layers_to_transform: 2",
            "layers_to_transform: 7",
            "exclude_modules"
        ]
    );
}

//= peft 0.21.2 utils/other.py ModulesToSaveWrapper
#[test]
fn tied_parameters_are_saved_once_or_become_two() {
    let fields = json!({"modules_to_save": ["embed_tokens"]});
    let apart = adapter(true, fields).unwrap();
    assert!(apart.unties() && apart.trains("embed_tokens.weight"));
    let fields = json!({"modules_to_save": ["lm_head"], "ensure_weight_tying": true});
    let tied = adapter(true, fields).unwrap();
    assert!(!tied.unties() && tied.trains("embed_tokens.weight"));
    assert!(!adapter(false, json!({"modules_to_save": ["lm_head"]})).unwrap().unties());
}

#[test]
fn an_adapted_embedding_is_stored_with_its_base() {
    let adapter = adapter(true, json!({"target_modules": ["embed_tokens"]})).unwrap();
    let map = adapter.extended(&base(true)).unwrap();
    assert_eq!(map.get("embed_tokens.lora_embedding_A").unwrap().shape(), [9, 8]);
    let file = adapter.file_map(&map).unwrap();
    let tensors: Vec<_> = file.stored_tensors().iter().map(|it| (it.name(), it.shape())).collect();
    let prefix = "base_model.model.model.embed_tokens";
    for (name, shape) in [
        (format!("{prefix}.base_layer.weight"), &[9, 4][..]),
        (format!("{prefix}.lora_embedding_A"), &[8, 9]),
        (format!("{prefix}.lora_embedding_B"), &[4, 8]),
    ] {
        assert!(tensors.contains(&(&name, shape)), "{name}: {tensors:?}");
    }
}
