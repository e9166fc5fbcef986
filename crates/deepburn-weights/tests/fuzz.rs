//! Fuzzes the JSON text of weight maps. A map is refused, or it reads and writes every stored
//! element once.

use std::collections::HashMap;
use std::convert::Infallible;

use deepburn_fuzz::fuzz;
use deepburn_weights::{Component, Composition, InitialValues, Origin, Weight, WeightMap};

fn matrix(name: &str, rows: usize, columns: usize) -> Component {
    Component::whole(name, &[rows, columns])
}

/// A map with a fused, a divided, a tied and a new parameter.
fn sound() -> Vec<u8> {
    let join = |axis, components| Composition::join(axis, components).unwrap();
    let fused =
        vec![matrix("q", 8, 6).transposed(), matrix("kv", 4, 6).sliced(0, 0..2).transposed()];
    let weights = vec![
        Weight::new("qk", join(1, fused)),
        Weight::new("v", join(0, vec![matrix("kv", 4, 6).sliced(0, 2..4)])),
        Weight::new("new", Composition::whole("new", &[3]))
            .with_origin(Origin::Fresh(InitialValues::Normal { std: 0.02 })),
        Weight::new("embed", Composition::whole("embed", &[5, 2]))
            .with_origin(Origin::Extended { new_rows: 2 }),
        Weight::new("head", Composition::whole("lm_head", &[5, 2]))
            .with_origin(Origin::Tied { to: "embed".into() }),
    ];
    let map = WeightMap::new(weights).unwrap();
    serde_json::to_vec(&map.with_optional_prefix("model.").with_ignored(["h.*.mask"])).unwrap()
}

/// Reads all parameters and writes them again.
fn round_trip(map: &WeightMap) {
    let mut tensors: HashMap<&str, Vec<usize>> = HashMap::new();
    for tensor in map.stored_tensors() {
        let numel = tensor.composition().num_elements();
        tensors.insert(tensor.name(), (0..numel).collect());
    }
    let mut count = 0;
    for weight in map.parameters() {
        let composition = weight.composition();
        let read = |name: &str, range: std::ops::Range<usize>, values: &mut Vec<usize>| {
            values.extend(&tensors[name][range]);
            Ok::<_, Infallible>(())
        };
        let values = composition.read(0..composition.num_elements(), read).unwrap();
        let write = |name: &str, start: usize, values: &[usize]| {
            assert!(values.iter().eq(&tensors[name][start..start + values.len()]), "{name}");
            count += values.len();
            Ok::<_, Infallible>(())
        };
        composition.write(&values, write).unwrap();
    }
    assert_eq!(count, tensors.values().map(Vec::len).sum::<usize>());
}

#[test]
fn mutated_maps_are_read_or_refused() {
    let sound = sound();
    let tokens = ["0", "1", "-1", "18446744073709551615", "[]", "null", "true", "\"q\"", "\"kv\""];
    let (mut refused, mut read) = (0, 0);
    fuzz(5_000, |mutator| {
        let mut text = sound.clone();
        match mutator.below(2) {
            0 => mutator.mutate(&mut text, &tokens),
            _ => mutator.mutate_json(&mut text),
        }
        let Ok(map) = serde_json::from_slice::<WeightMap>(&text) else { return refused += 1 };
        let numel = map.stored_tensors().iter().map(|it| it.composition().num_elements());
        if numel.fold(0, usize::saturating_add) < 1 << 16 {
            round_trip(&map);
            read += 1;
        }
    });
    assert!(refused > 0 && read > 0, "{refused} {read}");
}
