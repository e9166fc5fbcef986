//! Measures the memory of a process while its ranks shard a model, with a counting allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use burn_flex::{Flex, FlexDevice};
use deepburn::Ranks;
use deepburn::zero::Training;
use deepburn_models::LanguageModelConfig;
use deepburn_models::gpt2::{Gpt2, Gpt2Config, PretrainedGpt2};
use deepburn_models::{Architecture, FloatType};
use serde_json::json;

/// Counts allocated bytes and their peak.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grow(bytes: usize) {
    PEAK.fetch_max(LIVE.fetch_add(bytes, SeqCst) + bytes, SeqCst);
}

// SAFETY: all calls go to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), SeqCst);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

type Model = Gpt2<Training<Flex>>;

const RANKS: usize = 4;

/// A model with 20 MB of parameters, none of them larger than 1 MiB. The output layer is tied to
/// the embedding.
fn config() -> Gpt2Config {
    let sizes = json!({
        "n_layer": 6, "n_embd": 256, "n_head": 4, "n_positions": 64, "vocab_size": 1024,
    });
    Gpt2Config::small().with_overrides(sizes.as_object().expect("it is one")).unwrap()
}

fn bytes(config: &Gpt2Config) -> (usize, usize) {
    let parameters = config.parameters();
    let bytes = || parameters.iter().map(|it| it.shape.iter().product::<usize>() * 4);
    (bytes().sum(), bytes().max().unwrap_or(0))
}

/// Returns the peak of allocated bytes while four ranks of this process shard their models, minus
/// the bytes that were allocated before.
fn peak(stage: u8, new: impl Fn() -> Model + Sync) -> usize {
    let plan = json!({
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    });
    let plan = deepburn::plan(&plan.to_string(), RANKS).unwrap();
    let before = LIVE.load(SeqCst);
    PEAK.store(before, SeqCst);
    let engines = Ranks::threads().run(RANKS, deepburn::COLLECTIVE_TIMEOUT, |group| {
        drop(deepburn::initialize(new(), &plan, group)?);
        Ok(())
    });
    engines.unwrap_or_else(|failure| panic!("{failure}"));
    PEAK.load(SeqCst) - before
}

/// All cases are in one test, because they share the allocator of the process.
#[test]
fn ranks_hold_their_shards_and_two_parameters() {
    let (config, folder) = (config(), tempfile::tempdir().unwrap());
    let whole = Gpt2::<Flex>::new(&config, 5, &FlexDevice).unwrap();
    whole.save(folder.path(), FloatType::F32).unwrap();
    drop(whole);
    let drawn = || Gpt2::new(&config, 5, &FlexDevice).unwrap();
    let read = || {
        let checkpoint = PretrainedGpt2::open(folder.path()).unwrap();
        checkpoint.load_lazily(&config, &FlexDevice).unwrap()
    };
    // A first run allocates everything that is set up once per process.
    peak(3, drawn);
    // At stage 3 the shards of all ranks together are the model. Rank 0 creates a parameter, of
    // which it may have two copies for a moment, while other ranks still shard the previous one.
    // These are three parameters. Modules, descriptions of parameters and threads take the
    // remaining bytes.
    let (model, largest) = bytes(&config);
    let most = model + 3 * largest + (2 << 20);
    // Without sharding, rank threads share the full parameters.
    for (how, peak) in
        [("drawn", peak(3, drawn)), ("read", peak(3, read)), ("stage 0", peak(0, drawn))]
    {
        assert!(peak > model && peak < most, "{how}: {peak} bytes, model {model}, most {most}");
    }
}
