//! The cases of DeepSpeed's `tests/unit/launcher/test_run.py`, and additional cases.

use super::*;

fn one_host() -> Vec<HostSlots> {
    vec![HostSlots::new("worker-0", 4)]
}

fn two_hosts() -> Vec<HostSlots> {
    vec![HostSlots::new("worker-0", 4), HostSlots::new("worker-1", 4)]
}

fn include(hosts: &[HostSlots], list: &str) -> Result<Vec<(String, Vec<usize>)>, SelectionError> {
    pairs(Selection { include: Some(list.to_owned()), ..Selection::default() }.apply(hosts))
}

fn exclude(hosts: &[HostSlots], list: &str) -> Result<Vec<(String, Vec<usize>)>, SelectionError> {
    pairs(Selection { exclude: Some(list.to_owned()), ..Selection::default() }.apply(hosts))
}

fn pairs(
    selected: Result<Vec<HostSlots>, SelectionError>,
) -> Result<Vec<(String, Vec<usize>)>, SelectionError> {
    Ok(selected?.into_iter().map(|host| (host.name, host.slots)).collect())
}

fn expected(hosts: &[(&str, &[usize])]) -> Result<Vec<(String, Vec<usize>)>, SelectionError> {
    Ok(hosts.iter().map(|(name, slots)| ((*name).to_owned(), slots.to_vec())).collect())
}

#[test]
fn without_options_all_slots_are_used() {
    for hosts in [one_host(), two_hosts()] {
        assert_eq!(Selection::default().apply(&hosts), Ok(hosts.clone()));
        let empty = Selection {
            include: Some(String::new()),
            exclude: Some(String::new()),
            ..Selection::default()
        };
        assert_eq!(empty.apply(&hosts), Ok(hosts));
    }
}

//= deepspeed 0.19.8 launcher/runner.py parse_resource_filter
#[test]
fn include_and_exclude_exclude_each_other() {
    let both = Selection {
        include: Some("A".to_owned()),
        exclude: Some("B".to_owned()),
        ..Selection::default()
    };
    assert_eq!(both.apply(&[]), Err(SelectionError::IncludeAndExclude));
}

#[test]
fn slots_of_one_host() {
    let hosts = one_host();
    assert_eq!(exclude(&hosts, "worker-0:1"), expected(&[("worker-0", &[0, 2, 3])]));
    assert_eq!(exclude(&hosts, "worker-0:1,2"), expected(&[("worker-0", &[0, 3])]));
    assert_eq!(include(&hosts, "worker-0:1"), expected(&[("worker-0", &[1])]));
    assert_eq!(include(&hosts, "worker-0:1,1"), expected(&[("worker-0", &[1])]));
    assert_eq!(include(&hosts, "worker-0:1@worker-0:0,1"), expected(&[("worker-0", &[0, 1])]));
    assert_eq!(include(&hosts, "worker-0:3,0"), expected(&[("worker-0", &[0, 3])]));
    assert_eq!(include(&hosts, "worker-0"), expected(&[("worker-0", &[0, 1, 2, 3])]));
    assert_eq!(include(&hosts, "worker-0@worker-0:2"), expected(&[("worker-0", &[2])]));
}

#[test]
fn excluding_everything_is_an_error() {
    for list in ["worker-0", "worker-0:0,1,2,3"] {
        let error = SelectionError::NothingLeft { list: list.to_owned() };
        assert_eq!(exclude(&one_host(), list), Err(error));
    }
}

//= deepspeed 0.19.8 launcher/runner.py parse_resource_filter
#[test]
fn slots_of_two_hosts() {
    let hosts = two_hosts();
    assert_eq!(include(&hosts, "worker-1:0,3"), expected(&[("worker-1", &[0, 3])]));
    assert_eq!(exclude(&hosts, "worker-1"), expected(&[("worker-0", &[0, 1, 2, 3])]));
    assert_eq!(
        exclude(&hosts, "worker-0:0,1@worker-1:3"),
        expected(&[("worker-0", &[2, 3]), ("worker-1", &[0, 1, 2])])
    );
    // Hosts keep the order of the hostfile, not of the option.
    assert_eq!(
        include(&hosts, "worker-1:0@worker-0:2"),
        expected(&[("worker-0", &[2]), ("worker-1", &[0])])
    );
}

#[test]
fn what_is_not_there_is_named() {
    let hosts = two_hosts();
    for (option, select) in [("--include", include as fn(&_, &_) -> _), ("--exclude", exclude)] {
        let message = |list: &str| select(&hosts, list).unwrap_err().to_string();
        assert_eq!(
            message("jeff"),
            format!(
                "{option}: unknown host: `jeff`; the hosts are worker-0, worker-1; name one of them"
            )
        );
        assert_eq!(
            message("worker-1:4"),
            format!(
                "{option}: unknown slot: `worker-1:4`; the slots of worker-1 are 0, 1, 2, 3; name \
                 one of them"
            )
        );
        // A `@` in place of a comma.
        assert!(message("worker-1@worker-0:1@5").contains("unknown host: `5`"));
        assert!(message("worker-1@@worker-0").contains("unknown host: ``"));
        for entry in ["worker-0:", "worker-0:a", "worker-0:0:1", "worker-0:0-2", "worker-0:-1"] {
            assert_eq!(
                message(entry),
                format!(
                    "{option}: bad entry: `{entry}`; an entry is HOST or HOST:SLOT,SLOT,..., with \
                     @ between entries; correct it"
                )
            );
        }
    }
}

#[test]
fn counts_and_lists_exclude_each_other() {
    let hosts = [HostSlots::new("localhost", 1)];
    let list = Some("localhost".to_owned());
    for (nodes, gpus, count) in [
        (Some(1), None, "--num_nodes"),
        (Some(1), Some(1), "--num_nodes"),
        (None, Some(1), "--num_gpus"),
    ] {
        let counts = Selection { num_nodes: nodes, num_gpus: gpus, ..Selection::default() };
        let included = Selection { include: list.clone(), ..counts.clone() };
        let excluded = Selection { exclude: list.clone(), ..counts };
        for (selection, list) in [(included, "--include"), (excluded, "--exclude")] {
            assert_eq!(selection.apply(&hosts), Err(SelectionError::CountAndList { count, list }));
        }
    }
}

#[test]
fn counts_take_the_first_hosts_and_slots() {
    let select = |num_nodes, num_gpus| {
        pairs(Selection { num_nodes, num_gpus, ..Selection::default() }.apply(&two_hosts()))
    };
    assert_eq!(select(Some(1), None), expected(&[("worker-0", &[0, 1, 2, 3])]));
    assert_eq!(select(None, Some(2)), expected(&[("worker-0", &[0, 1]), ("worker-1", &[0, 1])]));
    assert_eq!(select(Some(1), Some(1)), expected(&[("worker-0", &[0])]));
    // As in DeepSpeed, the count may exceed the slots of the hostfile.
    assert_eq!(select(Some(1), Some(5)), expected(&[("worker-0", &[0, 1, 2, 3, 4])]));
    assert_eq!(select(Some(0), None), Err(SelectionError::Zero { option: "--num_nodes" }));
    assert_eq!(select(None, Some(0)), Err(SelectionError::Zero { option: "--num_gpus" }));
    let error = select(Some(3), None).unwrap_err().to_string();
    assert!(error.starts_with("--num_nodes: too many: 3; hosts in all: 2; "), "{error}");
}
