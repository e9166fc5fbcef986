//! Saves that fail, asynchronous saves, and saves at the wrong time.

use deepburn_checkpoint::{Checkpoint, Tag};
use deepburn_comm::CollectiveTag as CommTag;
use deepburn_learner::{EngineError, LoadPlan, SaveRequest};

use super::{LAST, MICRO_BATCHES, ON_HOST, end, micro_batch, owned, plan, run, save, with_engine};

#[test]
fn training_continues_after_a_failed_save() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    std::fs::write(&file, "in the way").unwrap();
    let messages = with_engine(&plan("fp32", 3, 2), |engine| {
        run(engine, MICRO_BATCHES)?;
        let error = engine.save_checkpoint(&file, SaveRequest::default()).unwrap_err();
        assert!(error.is_recoverable());
        run(engine, 2 * MICRO_BATCHES)?;
        save(engine, root.path())?;
        let tag = Some(Tag::of_step(engine.global_steps()));
        let request = SaveRequest { tag, ..SaveRequest::default() };
        let again = engine.save_checkpoint(root.path(), request).unwrap_err();
        assert!(again.is_recoverable() && again.to_string().contains("is never overwritten"));
        run(engine, 3 * MICRO_BATCHES)?;
        Ok(error.to_string())
    });
    assert!(messages[0].contains("file: cannot create"), "{messages:?}");
    assert!(messages[1].starts_with("rank 0: "), "{messages:?}");
    Checkpoint::open_intact(root.path(), None).unwrap();
}

/// A snapshot of a rank is not changed by steps that are taken before it is written.
#[test]
fn steps_do_not_change_a_save_in_progress() {
    let offloaded = ["fp32 on NVMe", "bf16 on NVMe", "fp16 in fp32 on NVMe"];
    let in_part = ["fp32 on host by 0.6", "bf16 on host by 0.6"];
    for kind in ["fp32", "bf16", "fp16 in fp32"].into_iter().chain(offloaded).chain(in_part) {
        for stage in if kind.contains(ON_HOST) { 3..4 } else { 0..4 } {
            with_engine(&plan(kind, stage, 3), |engine| {
                run(engine, 2 * MICRO_BATCHES + 1)?;
                let before = owned(engine);
                let held: Vec<_> = (0..engine.parameters().len())
                    .flat_map(|index| {
                        let states = engine.states();
                        let arrays = states.arrays(index).into_iter();
                        arrays.map(move |(array, _)| states.owned(index, array).unwrap())
                    })
                    .collect();
                run(engine, 4 * MICRO_BATCHES)?;
                for (before, held) in before.iter().zip(&held) {
                    let bytes = held.data(0..held.numel()).unwrap().as_bytes().to_vec();
                    assert_eq!(before.2, bytes, "{kind}, stage {stage}, {}", before.0);
                }
                Ok(())
            });
        }
    }
}

#[test]
fn training_continues_during_a_save() {
    for stage in 0..4 {
        let root = tempfile::tempdir().unwrap();
        let at = 3 * MICRO_BATCHES + 1;
        let straight = with_engine(&plan("bf16", stage, 3), |engine| {
            run(engine, at)?;
            let saved = owned(engine);
            let save = engine.start_save(root.path(), SaveRequest::default())?;
            assert_eq!(save.step(), 3);
            // Only one save at a time is possible.
            let error = engine.start_save(root.path(), SaveRequest::default()).unwrap_err();
            assert!(error.is_recoverable(), "{error}");
            let trace = run(engine, LAST)?;
            save.finish(engine.group())?;
            Ok((saved, trace, end(engine)?))
        });
        let checkpoint = Checkpoint::open_intact(root.path(), None).unwrap();
        let resumed = with_engine(&plan("bf16", stage, 3), |engine| {
            engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
            Ok((owned(engine), run(engine, LAST)?, end(engine)?))
        });
        assert_eq!(straight, resumed, "stage {stage}");
    }
}

#[test]
fn a_save_that_is_dropped_or_fails_leaves_no_files() {
    let root = tempfile::tempdir().unwrap();
    let names = || {
        let names = std::fs::read_dir(root.path()).unwrap();
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect::<Vec<_>>()
    };
    with_engine(&plan("fp32", 2, 2), |engine| {
        run(engine, MICRO_BATCHES)?;
        let save = engine.start_save(root.path(), SaveRequest::default())?;
        run(engine, 2 * MICRO_BATCHES)?;
        drop(save);
        engine.group().barrier(CommTag::new("dropped", 0)).map_err(EngineError::from)?;
        assert!(!names().iter().any(|name| name.starts_with("step-")), "{:?}", names());

        let save = engine.start_save(root.path(), SaveRequest::default())?;
        run(engine, 3 * MICRO_BATCHES)?;
        engine.group().barrier(CommTag::new("steps taken", 0)).map_err(EngineError::from)?;
        if engine.rank() == 0 {
            // The folder of the save is deleted by someone else.
            for name in names().iter().filter(|name| name.contains("partial")) {
                std::fs::remove_dir_all(root.path().join(name)).unwrap();
            }
        }
        engine.group().barrier(CommTag::new("tidied", 0)).map_err(EngineError::from)?;
        let error = save.finish(engine.group()).unwrap_err();
        assert!(error.is_recoverable(), "{error}");
        run(engine, 4 * MICRO_BATCHES)?;
        engine.start_save(root.path(), SaveRequest::default())?.finish(engine.group())?;
        Ok(())
    });
    assert_eq!(Checkpoint::open_intact(root.path(), None).unwrap().run().step, 4);
}

#[test]
fn saving_and_loading_in_the_middle_of_a_pass_are_refused() {
    let root = tempfile::tempdir().unwrap();
    with_engine(&plan("fp32", 1, 2), |engine| {
        save(engine, root.path())?;
        let checkpoint = Checkpoint::open(root.path(), None)?;
        let loss = engine.forward(|net| net.loss(0))?;
        let error = save(engine, root.path()).unwrap_err().to_string();
        assert!(error.contains("between forward and backward"), "{error}");
        let error = engine.load_checkpoint(&checkpoint, LoadPlan::ALL).unwrap_err().to_string();
        assert!(error.contains("between forward and backward"), "{error}");
        engine.backward(loss)?;
        engine.step()?;
        engine.no_sync(micro_batch)?;
        let error = save(engine, root.path()).unwrap_err().to_string();
        assert!(error.contains("after no_sync"), "{error}");
        Ok(())
    });
}
