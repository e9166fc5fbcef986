//! Profiles of small models with known sums.

use super::*;
use proptest::prelude::*;

fn entry(path: &str, parameters: u64, forward: u64) -> ModuleFlops {
    ModuleFlops { path: path.to_owned(), parameters, forward, backward: 2 * forward }
}

fn model() -> FlopsProfile {
    FlopsProfile::new(
        "gpt2",
        &[
            entry("wte", 1000, 0),
            entry("h.0.attn", 300, 4_000),
            entry("h.0.attn.c_proj", 100, 2_000),
            entry("h.0.mlp", 600, 8_000),
            entry("h.1.mlp", 600, 8_000),
            entry("h.1.mlp", 0, 2_000),
            entry("", 0, 6_000),
        ],
    )
}

fn options() -> FlopsOptions {
    FlopsOptions {
        step: 3,
        ranks: 2,
        step_seconds: Some(0.1),
        peak_flops: Some(1e6),
        recompute_fwd_factor: 0.5,
        module_depth: None,
        top_modules: 1,
        detailed: true,
    }
}

fn printed(options: &FlopsOptions) -> String {
    let mut text = String::new();
    model().write(&mut text, options).unwrap();
    text
}

#[test]
fn totals_add_up() {
    let totals = model().totals();
    assert_eq!((totals.parameters, totals.forward, totals.backward), (2600, 30_000, 60_000));
    // A frozen module has no backward pass.
    let frozen = ModuleFlops { backward: 0, ..entry("a", 1, 5) };
    assert_eq!(FlopsProfile::new("m", &[frozen]).totals().backward, 0);
    assert_eq!(FlopsProfile::new("m", &[]).totals(), FlopsTotals::default());
}

#[test]
fn utilization_leaves_out_what_is_computed_again() {
    let close = |share: Option<f64>, expected: f64| (share.unwrap() - expected).abs() < 1e-12;
    assert!(close(model().model_flops_utilization(&options()), 0.9));
    assert!(close(model().hardware_flops_utilization(&options()), 1.05));
    for options in [
        FlopsOptions { peak_flops: None, ..options() },
        FlopsOptions { step_seconds: None, ..options() },
        FlopsOptions { step_seconds: Some(0.0), ..options() },
    ] {
        assert_eq!(model().model_flops_utilization(&options), None);
    }
}

#[test]
fn everything_is_printed() {
    let text = printed(&options());
    for line in [
        "Floating-point operations of step 3, on rank 0",
        "  ranks                             2",
        "  parameters                        2.60 k",
        "  forward                           30.00 kFLOP",
        "  backward                          60.00 kFLOP",
        "  forward, again in backward        15.00 kFLOP",
        "  step                              105.00 kFLOP",
        "  step a second                     1.05 MFLOP/s",
        "  model FLOPs utilization (MFU)     90.00 %",
        "  hardware FLOPs utilization (HFU)  105.00 %",
        "  depth 0",
        "    parameters        gpt2 2.60 k",
        "    parameters        h 1.60 k",
        "    forward           h.0 14.00 kFLOP",
        "  depth 4",
        "  gpt2: 2.60 k parameters (100.00 %), forward 30.00 kFLOP (100.00 %)",
        "    wte: 1.00 k parameters (38.46 %), forward 0 FLOP (0.00 %)",
        "          c_proj: 100 parameters (3.85 %), forward 2.00 kFLOP (6.67 %)",
    ] {
        assert!(text.lines().any(|printed| printed == line), "no {line:?} in\n{text}");
    }
}

#[test]
fn options_shorten_it() {
    let short = FlopsOptions {
        module_depth: Some(1),
        top_modules: 2,
        detailed: false,
        recompute_fwd_factor: 0.0,
        peak_flops: None,
        step_seconds: None,
        ..options()
    };
    let text = printed(&short);
    assert!(text.contains("    parameters        h 1.60 k, wte 1.00 k\n"), "{text}");
    for absent in ["depth 2", "All modules", "again", "utilization", "time of the step"] {
        assert!(!text.contains(absent), "{absent:?} in\n{text}");
    }
    let deep = printed(&FlopsOptions { module_depth: Some(99), ..options() });
    assert!(deep.contains("depth 4") && !deep.contains("depth 5"), "{deep}");
}

#[test]
fn numbers_have_prefixes() {
    for (value, text) in [
        (0.0, "0 FLOP"),
        (0.25, "0.25 FLOP"),
        (999.0, "999 FLOP"),
        (1e3, "1.00 kFLOP"),
        (6.7e12, "6.70 TFLOP"),
        (2.5e18, "2500.00 PFLOP"),
    ] {
        assert_eq!(quantity(value, "FLOP"), text);
    }
    assert_eq!(quantity(124.44e6, ""), "124.44 M");
    assert_eq!([duration(1.5), duration(0.02), duration(3e-6)], ["1.50 s", "20.00 ms", "3.00 us"]);
}

proptest! {
    #[test]
    fn no_order_and_no_path_changes_the_totals(
        entries in prop::collection::vec(("[ab.]{0,6}", 0..1_000_u64, 0..1_000_u64), 0..20),
    ) {
        let mut entries: Vec<_> =
            entries.iter().map(|(path, numel, ops)| entry(path, *numel, *ops)).collect();
        let totals = FlopsProfile::new("m", &entries).totals();
        prop_assert_eq!(totals.forward, entries.iter().map(|entry| entry.forward).sum::<u64>());
        prop_assert_eq!(totals.backward, 2 * totals.forward);
        entries.reverse();
        let reversed = FlopsProfile::new("m", &entries);
        prop_assert_eq!(reversed.totals(), totals);
        reversed.write(&mut String::new(), &options()).unwrap();
    }
}
