//! Property tests of whole maps: parameters are divided and joined at random.

use std::collections::HashMap;
use std::convert::Infallible;
use std::ops::Range;

use proptest::prelude::*;

use crate::{Component, Composition, Origin, Weight, WeightMap, WeightMapError};

/// The values of arrays by name.
type Arrays = HashMap<String, Vec<u32>>;

fn matrix(name: &str, rows: usize, columns: usize) -> Component {
    Component::whole(name, &[rows, columns])
}

/// Returns a function that reads `arrays` and counts how often each element is read.
fn reading<'a>(
    arrays: &'a Arrays,
    counts: &'a mut HashMap<String, Vec<usize>>,
) -> impl FnMut(&str, Range<usize>, &mut Vec<u32>) -> Result<(), Infallible> + 'a {
    move |name, range, values| {
        values.extend(&arrays[name][range.clone()]);
        let numel = arrays[name].len();
        let counts = counts.entry(name.to_owned()).or_insert_with(|| vec![0; numel]);
        counts[range].iter_mut().for_each(|count| *count += 1);
        Ok(())
    }
}

/// Returns arrays of different values for each tensor.
fn filled(map: &WeightMap) -> Arrays {
    let mut next = 0;
    let fill = |tensor: &crate::StoredTensor| {
        let first = next;
        next += tensor.composition().num_elements() as u32;
        (tensor.name().to_owned(), (first..next).collect())
    };
    map.stored_tensors().iter().map(fill).collect()
}

/// Reads all parameters, checking that every stored element is read once.
fn read_all(map: &WeightMap, tensors: &Arrays) -> Arrays {
    let mut counts = HashMap::new();
    let mut parameters = Arrays::new();
    for weight in map.parameters() {
        let composition = weight.composition();
        let read = reading(tensors, &mut counts);
        let values = composition.read(0..composition.num_elements(), read).unwrap();
        parameters.insert(weight.path().to_owned(), values);
    }
    for (name, values) in tensors {
        let counts = counts.get(name).cloned().unwrap_or_default();
        assert_eq!(counts, vec![1; values.len()], "{name}");
    }
    parameters
}

/// Writes all parameters, checking that every stored element is written once.
fn write_all(map: &WeightMap, parameters: &Arrays) -> Arrays {
    let empty = |tensor: &crate::StoredTensor| {
        (tensor.name().to_owned(), vec![None; tensor.composition().num_elements()])
    };
    let mut written: HashMap<String, Vec<Option<u32>>> =
        map.stored_tensors().iter().map(empty).collect();
    for weight in map.parameters() {
        let sink = |name: &str, start: usize, values: &[u32]| {
            let place = &mut written.get_mut(name).unwrap()[start..start + values.len()];
            for (place, value) in place.iter_mut().zip(values) {
                assert_eq!(place.replace(*value), None, "{name} is written twice");
            }
            Ok::<_, Infallible>(())
        };
        weight.composition().write(&parameters[weight.path()], sink).unwrap();
    }
    let whole = |values: Vec<Option<u32>>| values.into_iter().map(Option::unwrap).collect();
    written.into_iter().map(|(name, values)| (name, whole(values))).collect()
}

/// A rectangle of random sizes that is divided into a row of parts, each of which is a part of a
/// parameter.
fn parts() -> impl Strategy<Value = (usize, Vec<usize>)> {
    (1..80_usize, prop::collection::vec(1..70_usize, 1..5))
}

/// Returns a map in which tensors are joined to one parameter, or one tensor is divided into
/// several.
fn random_map() -> impl Strategy<Value = WeightMap> {
    let group = (parts(), any::<[bool; 4]>(), prop::collection::vec(any::<bool>(), 5));
    prop::collection::vec(group, 1..5).prop_map(|groups| {
        let mut weights = Vec::new();
        for (index, ((other, sizes), [divided, columns, turned, vectors], flips)) in
            groups.into_iter().enumerate()
        {
            // The axis along which the whole is divided.
            let axis = usize::from(columns && !vectors);
            let shape = |size: usize| match (vectors, axis) {
                (true, _) => vec![size],
                (false, 0) => vec![size, other],
                (false, _) => vec![other, size],
            };
            if divided {
                let whole = shape(sizes.iter().sum());
                let mut start = 0;
                for (part, size) in sizes.iter().enumerate() {
                    let component = Component::whole(format!("t{index}"), &whole)
                        .sliced(axis, start..start + size);
                    let component =
                        if turned && !vectors { component.transposed() } else { component };
                    let composition = Composition::join(0, vec![component]).unwrap();
                    weights.push(Weight::new(format!("p{index}.{part}"), composition));
                    start += size;
                }
            } else {
                let component = |(part, size): (usize, &usize)| {
                    let (name, mut shape) = (format!("t{index}.{part}"), shape(*size));
                    if flips[part] && !vectors {
                        shape.reverse();
                        return Component::whole(name, &shape).transposed();
                    }
                    Component::whole(name, &shape)
                };
                let components = sizes.iter().enumerate().map(component).collect();
                let composition = Composition::join(axis, components).unwrap();
                weights.push(Weight::new(format!("p{index}"), composition));
            }
        }
        WeightMap::new(weights).unwrap()
    })
}

proptest! {
    #[test]
    fn writing_and_reading_are_inverse(map in random_map()) {
        let tensors = filled(&map);
        let parameters = read_all(&map, &tensors);
        prop_assert_eq!(&write_all(&map, &parameters), &tensors);
        // A stored tensor that is composed from parameters is the same.
        let mut counts = HashMap::new();
        for tensor in map.stored_tensors() {
            let composition = tensor.composition();
            let read = reading(&parameters, &mut counts);
            let values = composition.read(0..composition.num_elements(), read).unwrap();
            prop_assert_eq!(&values, &tensors[tensor.name()]);
        }
        prop_assert!(counts.values().flatten().all(|count| *count == 1));
    }

    #[test]
    fn a_range_is_a_part_of_the_whole(
        map in random_map(),
        cuts in prop::array::uniform2(0.0..1.0_f64),
    ) {
        let tensors = filled(&map);
        for weight in map.parameters() {
            let composition = weight.composition();
            let numel = composition.num_elements();
            let [a, b] = cuts.map(|cut| (cut * (numel + 1) as f64) as usize);
            let range = a.min(b)..a.max(b);
            let mut counts = HashMap::new();
            let whole = composition.read(0..numel, reading(&tensors, &mut counts)).unwrap();
            let part = composition.read(range.clone(), reading(&tensors, &mut counts)).unwrap();
            prop_assert_eq!(&part[..], &whole[range]);
        }
    }

    #[test]
    fn maps_are_serializable(map in random_map()) {
        let map = map.with_optional_prefix("model.").with_ignored(["h.*.bias"]);
        let text = serde_json::to_string(&map).unwrap();
        prop_assert_eq!(serde_json::from_str::<WeightMap>(&text).unwrap(), map);
    }
}

#[test]
fn matrices_that_are_larger_than_a_block_are_transposed() {
    for (rows, columns) in [(700, 900), (3, 300_000), (300_000, 3)] {
        let composition = Composition::join(
            1,
            vec![
                matrix("a", columns, rows).transposed(),
                matrix("b", rows, 2),
                matrix("c", 7, rows).sliced(0, 1..6).transposed(),
            ],
        )
        .unwrap();
        let width = columns + 2 + 5;
        assert_eq!(composition.shape(), [rows, width]);
        let arrays: Arrays = [("a", columns * rows), ("b", 2 * rows), ("c", 7 * rows)]
            .into_iter()
            .map(|(name, numel)| (name.to_owned(), (0..numel as u32).collect()))
            .collect();
        let mut counts = HashMap::new();
        let range = rows * width / 3..rows * width - 5;
        let values = composition.read(range.clone(), reading(&arrays, &mut counts)).unwrap();
        for (index, value) in range.zip(values) {
            let (row, column) = (index / width, index % width);
            let expected = match column {
                _ if column < columns => column * rows + row,
                _ if column < columns + 2 => row * 2 + column - columns,
                _ => (column - columns - 1) * rows + row,
            };
            assert_eq!(value, expected as u32, "row {row}, column {column}");
        }
    }
}

#[test]
fn no_memory_is_reserved_for_values_that_the_source_refuses() {
    // Each has 4 TiB of f32.
    let square = || matrix("w", 1 << 20, 1 << 20);
    let half = |name| matrix(name, 1 << 20, 1 << 19);
    let of = |components| Composition::join(1, components).unwrap();
    for composition in
        [of(vec![square()]), of(vec![square().transposed()]), of(vec![half("q"), half("k")])]
    {
        let refuse = |_: &str, _, _: &mut Vec<f32>| Err("shorter");
        assert_eq!(composition.read::<f32, _>(0..1 << 40, refuse), Err("shorter"));
    }
}

#[test]
fn arrays_of_more_dimensions_are_joined_and_divided() {
    let weights = vec![
        Weight::new(
            "joined",
            Composition::join(
                1,
                vec![Component::whole("a", &[2, 3, 4]), Component::whole("b", &[2, 1, 4])],
            )
            .unwrap(),
        ),
        Weight::new(
            "left",
            Composition::join(0, vec![Component::whole("c", &[2, 3, 4]).sliced(2, 0..1)]).unwrap(),
        ),
        Weight::new(
            "right",
            Composition::join(0, vec![Component::whole("c", &[2, 3, 4]).sliced(2, 1..4)]).unwrap(),
        ),
        Weight::new("scalar", Composition::whole("d", &[])),
        Weight::new("empty", Composition::whole("e", &[0, 4])),
    ];
    let map = WeightMap::new(weights).unwrap();
    let tensors = filled(&map);
    let parameters = read_all(&map, &tensors);
    assert_eq!(parameters["joined"].len(), 32);
    assert_eq!(parameters["joined"][12..16], tensors["b"][..4]);
    assert_eq!(parameters["left"], [0, 4, 8, 12, 16, 20].map(|at| tensors["c"][at]));
    assert_eq!(write_all(&map, &parameters), tensors);
}

fn map_of(components: Vec<Component>) -> Result<WeightMap, WeightMapError> {
    let weight = |(index, component)| {
        Ok(Weight::new(format!("p{index}"), Composition::join(0, vec![component])?))
    };
    WeightMap::new(components.into_iter().enumerate().map(weight).collect::<Result<_, _>>()?)
}

#[test]
fn inconsistent_maps_are_refused() {
    let cases = [
        (
            vec![matrix("t", 4, 2), matrix("t", 4, 2)],
            "0..4 of axis 0 of tensor t belong to both p0 and p1",
        ),
        (
            vec![matrix("t", 4, 2).sliced(0, 0..3), matrix("t", 4, 2).sliced(0, 2..4)],
            "2..3 of axis 0 of tensor t belong to both p0 and p1",
        ),
        (
            vec![matrix("t", 4, 2).sliced(0, 0..4), matrix("t", 4, 2).sliced(0, 1..2)],
            "1..2 of axis 0 of tensor t belong to both",
        ),
        (
            vec![matrix("t", 4, 2).sliced(0, 3..4), matrix("t", 4, 2).sliced(0, 0..2)],
            "2..3 of axis 0 of tensor t belong to no parameter",
        ),
        (vec![matrix("t", 4, 2).sliced(1, 0..1)], "1..2 of axis 1 of tensor t belong to no"),
        (
            vec![matrix("t", 4, 2).sliced(0, 0..2), matrix("t", 4, 2).sliced(1, 0..2)],
            "t is divided along more than one axis",
        ),
        (vec![matrix("t", 4, 2), matrix("t", 4, 3)], "t has shape [4, 2] for p0 and [4, 3] for p1"),
        (vec![matrix("t", 4, 2).sliced(0, 2..5)], "no positions 2..5 along axis 0"),
        (vec![matrix("t", 4, 2).sliced(2, 0..1)], "no positions 0..1 along axis 2"),
        (vec![matrix("t", 4, 2).sliced(0, 2..2)], "no positions 2..2"),
        (vec![Component::whole("t", &[4]).transposed()], "only matrices can be transposed"),
        (vec![Component::whole("t", &[usize::MAX, 2])], "too many elements"),
        (vec![matrix("t", 0, 2), matrix("t", 0, 2)], "tensor t belong to both p0 and p1"),
    ];
    for (components, expected) in cases {
        let error = map_of(components).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let weight = |path: &str| Weight::new(path, Composition::whole("t", &[2]));
    let error = WeightMap::new(vec![weight("p"), weight("p")]).unwrap_err();
    assert_eq!(error, WeightMapError::SamePath { path: "p".into() });
    let joined = Composition::join(0, vec![matrix("a", 2, 3), matrix("b", 2, 4)]).unwrap_err();
    assert!(joined.to_string().contains("b: shape [2, 4] cannot be joined"), "{joined}");
    assert!(Composition::join(2, vec![matrix("a", 2, 3), matrix("b", 2, 3)]).is_err());
    assert!(Composition::join(0, vec![]).is_err());
}

#[test]
fn tied_parameters_are_no_tensors_of_their_own() {
    let tied = |to: &str| {
        Weight::new("head", Composition::whole("lm_head", &[5, 2]))
            .with_origin(Origin::Tied { to: to.to_owned() })
    };
    let table = Weight::new("table", Composition::whole("embed", &[5, 2]));
    let map = WeightMap::new(vec![table.clone(), tied("table")]).unwrap();
    assert_eq!(map.stored_tensors().len(), 1);
    assert_eq!(map.parameters().map(Weight::path).collect::<Vec<_>>(), ["table"]);
    let pairs = map.tied().map(|(own, other)| (own.path(), other.path()));
    assert_eq!(pairs.collect::<Vec<_>>(), [("head", "table")]);
    assert!(map.has_tensor("lm_head"));
    for to in ["head", "other"] {
        let error = WeightMap::new(vec![table.clone(), tied(to)]).unwrap_err();
        assert!(matches!(error, WeightMapError::Tied { .. }), "{error}");
    }
}

#[test]
fn new_rows_are_a_part_of_the_shape() {
    let weight = |new_rows| {
        Weight::new("table", Composition::whole("embed", &[5, 2]))
            .with_origin(Origin::Extended { new_rows })
    };
    let map = WeightMap::new(vec![weight(3)]).unwrap();
    assert_eq!((map.weights()[0].shape(), map.weights()[0].num_elements()), (vec![8, 2], 16));
    assert_eq!(map.stored_tensors()[0].shape(), [5, 2]);
    assert!(WeightMap::new(vec![weight(usize::MAX)]).is_err());
}

#[test]
fn names_in_files_may_lack_the_prefix() {
    let map = WeightMap::as_trained([("wte", vec![2]), ("h.0.bias", vec![3])]).unwrap();
    let map = map.renamed(|name| format!("transformer.{name}")).unwrap();
    let map = map.with_optional_prefix("transformer.").with_ignored(["transformer.h.*.mask"]);
    for (in_file, expected) in [
        ("transformer.wte", Some("transformer.wte")),
        ("wte", Some("transformer.wte")),
        ("h.0.bias", Some("transformer.h.0.bias")),
        ("other", Some("other")),
        ("h.12.mask", None),
        ("transformer.h.0.mask", None),
        ("h.x.mask", Some("h.x.mask")),
    ] {
        assert_eq!(map.tensor_name(in_file).as_deref(), expected, "{in_file}");
    }
    assert_eq!(map.stored_name("wte"), "transformer.wte");
    assert_eq!(map.stored_name("buffer"), "buffer");
}

#[test]
fn linear_layers_are_transposed_by_path() {
    let map = WeightMap::as_trained([("up.weight", vec![3, 6]), ("up.bias", vec![6])]).unwrap();
    let turned = map.clone().transposed(|path| path.ends_with("weight")).unwrap();
    assert_eq!(turned.stored_tensors()[0].shape(), [6, 3]);
    assert_eq!(turned.weights()[0].shape(), [3, 6]);
    let error = map.transposed(|_| true).unwrap_err().to_string();
    assert!(error.contains("up.bias") && error.contains("only matrices"), "{error}");
}
