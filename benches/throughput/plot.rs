//! The figures as a picture.

use std::{error::Error, path::Path, time::Duration};

use plotters::{
    coord::ranged1d::{AsRangedCoord, ValueFormatter},
    prelude::*,
};

/// One contender's figures.
pub struct Line {
    pub name: String,
    pub points: Vec<Point>,
}

pub struct Point {
    pub in_flight: f64,
    pub per_second: f64,
    pub median: Duration,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// Throughput above and latency below, against events in flight.
pub fn draw(path: &Path, machine: &str, lines: &[Line]) -> Result<(), Box<dyn Error>> {
    let whole = SVGBackend::new(path, (860, 800)).into_drawing_area();
    whole.fill(&WHITE)?;
    let title = ("sans-serif", 22).into_font();
    let titled = whole.titled("Fresh events: claimed, and marked done", title)?;
    let small = ("sans-serif", 13).into_font().color(&BLACK.mix(0.7));
    let titled = titled.titled(machine, small)?;
    let (above, below) = titled.split_vertically(400);

    let points = || lines.iter().flat_map(|line| &line.points);
    let most = points().map(|point| point.per_second).fold(0.0, f64::max);
    let thousands = |point: &Point| point.per_second / 1000.0;
    chart(&above, "thousand events per second", 0.0..most * 1.1 / 1000.0, lines, thousands)?;
    let millis = |point: &Point| point.median.as_secs_f64() * 1000.0;
    let slowest = points().map(millis).fold(0.0, f64::max);
    let range = (0.1..slowest * 2.0).log_scale();
    chart(&below, "median latency, ms (log)", range, lines, millis)?;
    whole.present()?;
    Ok(())
}

fn chart<Y>(
    area: &Area<'_>,
    what: &str,
    range: Y,
    lines: &[Line],
    value: impl Fn(&Point) -> f64,
) -> Result<(), Box<dyn Error>>
where
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d((0.9..300.0).log_scale().base(4.0), range)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .x_labels(9)
        .x_label_formatter(&|in_flight| format!("{in_flight:.0}"))
        .x_desc("events in flight (log)")
        .y_desc(what)
        .label_style(("sans-serif", 14))
        .draw()?;
    for (place, line) in lines.iter().enumerate() {
        let color = COLORS[place % COLORS.len()];
        let points = || line.points.iter().map(|point| (point.in_flight, value(point)));
        chart
            .draw_series(LineSeries::new(points(), color.stroke_width(2)))?
            .label(&line.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
        chart.draw_series(points().map(|at| Circle::new(at, 4, color.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.2))
        .label_font(("sans-serif", 14))
        .draw()?;
    Ok(())
}

/// Told apart by the colour-blind too.
const COLORS: [RGBColor; 4] =
    [RGBColor(120, 120, 120), RGBColor(213, 94, 0), RGBColor(86, 180, 233), RGBColor(0, 90, 160)];
