//! The goodput table is what it was, to the digit. A change that is meant updates `goodput.txt` by the command in its second line.

#[test]
fn goodput_is_as_in_the_snapshot() {
    let now = ferroce_sim::goodput::table().to_string();
    let snapshot = include_str!("../goodput.txt");
    assert!(now == snapshot, "the snapshot says\n{snapshot}\nbut now it is\n{now}");
}
