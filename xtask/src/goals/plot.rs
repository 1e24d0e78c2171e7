//! Bandwidth and rate of messages by size, as SVG: one picture for each place, each way to wait and each of the two.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, anyhow, bail};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::report::Outcome;
use super::rows::Set;
use super::subject::{Bytes, Measure, Where};
use crate::bench::median;

/// Size of a picture.
const WIDTH: u32 = 460;
const HEIGHT: u32 = 320;
/// Colours that people who do not see all colours can tell apart, too.
const COLOURS: [RGBColor; 5] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(120, 120, 120),
    RGBColor(204, 121, 167),
];

/// What a picture shows of a rate.
struct Unit {
    name: &'static str,
    /// Of a size in bytes and a rate in Gbit/s.
    of: fn(u32, f64) -> f64,
    /// Where curves usually are not.
    legend: SeriesLabelPosition,
}

const GBIT: Unit = Unit { name: "Gbit/s", of: |_, rate| rate, legend: SeriesLabelPosition::LowerRight };
const MESSAGES: Unit = Unit {
    name: "million messages/s",
    of: |bytes, rate| rate * 1000.0 / 8.0 / f64::from(bytes),
    legend: SeriesLabelPosition::LowerLeft,
};

/// Points by size in bytes.
type Curve = BTreeMap<u32, f64>;
/// Curves by their names.
type Curves = BTreeMap<String, Curve>;

/// Draws the rows of the set `sizes` that have numbers.
pub(super) fn svg(outcomes: &[Outcome<'_>]) -> Result<String> {
    let panels = panels(outcomes);
    if panels.is_empty() {
        bail!("there is nothing to plot: none of the rows has the set `sizes` and numbers");
    }
    let mut drawn = String::new();
    let rows = u32::try_from(panels.len()).map_err(|_| anyhow!("too many pictures"))?;
    let root = SVGBackend::with_string(&mut drawn, (2 * WIDTH, rows * HEIGHT)).into_drawing_area();
    root.fill(&WHITE).map_err(in_words)?;
    let names: BTreeSet<&String> = panels.iter().flat_map(|(_, curves)| curves.keys()).collect();
    let colours: BTreeMap<&String, RGBColor> = names.into_iter().zip(COLOURS.into_iter().cycle()).collect();
    for ((title, curves), area) in panels.iter().zip(root.split_evenly((panels.len(), 1))) {
        let halves = area.split_evenly((1, 2));
        for (half, unit) in halves.iter().zip([GBIT, MESSAGES]) {
            draw(half, title, &unit, curves, &colours)?;
        }
    }
    root.present().map_err(in_words)?;
    drop(root);
    Ok(drawn)
}

/// Gbit/s by title, name and size.
fn panels(outcomes: &[Outcome<'_>]) -> Vec<(String, Curves)> {
    let mut panels: BTreeMap<(Where, bool), Curves> = BTreeMap::new();
    for outcome in outcomes.iter().filter(|outcome| outcome.row.set == Set::Sizes) {
        let row = outcome.row;
        let curves = panels.entry((row.ours.place, row.ours.is_sleeping())).or_default();
        for (name, values) in [(row.what.to_owned(), &outcome.ours), (row.with(), &outcome.theirs)] {
            let bytes = row.ours.bytes();
            let middle = median(values);
            let gbit = match row.measure {
                Measure::Messages => middle * f64::from(bytes) * 8.0 / 1000.0,
                _ => middle,
            };
            // A logarithm of nothing is nowhere.
            if gbit > 0.0 {
                curves.entry(name).or_default().insert(bytes, gbit);
            }
        }
    }
    let how = |sleeping| if sleeping { "sleeping" } else { "polling" };
    let panels = panels.into_iter().filter(|(_, curves)| !curves.is_empty());
    panels.map(|((place, sleeping), curves)| (format!("{place}, {}", how(sleeping)), curves)).collect()
}

fn draw(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    title: &str,
    unit: &Unit,
    curves: &Curves,
    colours: &BTreeMap<&String, RGBColor>,
) -> Result<()> {
    // All sizes are powers of two, which are the axis.
    let point = |(bytes, rate): (&u32, &f64)| (bytes.ilog2(), (unit.of)(*bytes, *rate));
    let points = |curve: &Curve| curve.iter().map(point).collect::<Vec<_>>();
    let all: Vec<(u32, f64)> = curves.values().flat_map(points).collect();
    let (powers, values) = (all.iter().map(|point| point.0), all.iter().map(|point| point.1));
    let (left, right) = (powers.clone().min().unwrap_or(0), powers.max().unwrap_or(0) + 1);
    let low = values.clone().fold(f64::INFINITY, f64::min);
    let high = values.fold(0.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{title}: {}", unit.name), ("sans-serif", 15))
        .margin(10)
        // Half of the last label stands there.
        .margin_right(24)
        .x_label_area_size(28)
        .y_label_area_size(52)
        .build_cartesian_2d(left..right, (low / 1.5..high * 1.5).log_scale())
        .map_err(in_words)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_labels(12)
        .x_label_formatter(&|power| Bytes(1 << power).to_string())
        .y_label_formatter(&|value| format!("{value}"))
        .draw()
        .map_err(in_words)?;
    for (name, curve) in curves {
        let colour = colours[name];
        let line = LineSeries::new(points(curve), colour.stroke_width(2)).point_size(3);
        let label = chart.draw_series(line).map_err(in_words)?.label(name);
        label.legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    let labels = &mut chart.configure_series_labels();
    labels.background_style(WHITE.mix(0.8)).position(unit.legend.clone()).draw().map_err(in_words)
}

fn in_words(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("cannot draw: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::rows::{Row, rows};
    use crate::goals::subject::Sample;

    /// Rows of one place with numbers, which are the larger the later.
    fn measured(rows: &[Row]) -> Vec<Outcome<'_>> {
        let mut outcomes = Vec::new();
        for (index, row) in rows.iter().enumerate() {
            let mut outcome = Outcome::new(row, None);
            let sample = |value: f64| Ok(Sample::from([(row.measure, value)]));
            outcome.add(sample(2.0 + index as f64), Some(sample(1.0)));
            outcomes.push(outcome);
        }
        outcomes
    }

    #[test]
    fn a_picture_has_all_curves_and_is_well_formed() {
        let rows: Vec<Row> = rows().into_iter().filter(|row| row.set == Set::Sizes).collect();
        let drawn = svg(&measured(&rows)).expect("there is something");
        for text in ["WRITE", "READ", "SEND", "FETCH_ADD", "TCP (iperf3)", "one host, polling: Gbit/s", "1 MiB"] {
            assert!(drawn.contains(text), "{text} is missing");
        }
        assert!(drawn.matches("<polyline").count() >= 6 * 2 * 4, "a curve is missing");
        assert_eq!(elements_left_open(&drawn), Vec::<String>::new());
    }

    #[test]
    fn one_point_is_enough_and_none_is_an_error() {
        let rows: Vec<Row> = rows().into_iter().filter(|row| row.set == Set::Sizes).take(1).collect();
        let drawn = svg(&measured(&rows)).expect("a point");
        assert_eq!(elements_left_open(&drawn), Vec::<String>::new());
        assert!(svg(&[]).is_err());
        assert!(svg(&[Outcome::new(&rows[0], None)]).is_err(), "no numbers");
    }

    #[test]
    fn messages_and_bits_meet_in_one_curve() {
        let rows: Vec<Row> = rows().into_iter().filter(|row| row.set == Set::Sizes).collect();
        let small = rows.iter().find(|row| row.measure == Measure::Messages).expect("is there");
        let mut outcome = Outcome::new(small, None);
        outcome.add(Ok(Sample::from([(Measure::Messages, 5.0)])), None);
        let (_, curves) = panels(&[outcome]).remove(0);
        assert_eq!(curves["WRITE"][&2], 5e6 * 2.0 * 8.0 / 1e9);
    }

    /// Reads the tags of an SVG: what is opened and not closed in its order, or closed and not open.
    fn elements_left_open(svg: &str) -> Vec<String> {
        let mut open: Vec<String> = Vec::new();
        assert!(svg.trim_start().starts_with("<svg "), "the root is svg");
        for tag in svg.split('<').skip(1) {
            let (tag, _) = tag.split_once('>').expect("a tag ends");
            assert_eq!(tag.matches('"').count() % 2, 0, "quotes of <{tag}>");
            let name = tag.trim_start_matches('/').split([' ', '\n', '/']).next().unwrap_or_default().to_owned();
            if tag.starts_with('/') {
                assert_eq!(open.pop().as_ref(), Some(&name), "</{name}> closes another element");
            } else if !tag.ends_with('/') {
                open.push(name);
            }
        }
        open
    }
}
