//! The time as templates see it. All times are UTC, so that a result does not depend on the machine's
//! settings.

use std::time::{SystemTime, UNIX_EPOCH};

const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// Seconds of the years 1 and 9999, which bound the times that Python has.
const RANGE: (i64, i64) = (-62_135_596_800, 253_402_300_799);

/// Seconds since 1970.
pub(super) fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64)
}

/// Python's `strftime`, with the directives that templates use.
pub(super) fn format(seconds: i64, format: &str) -> Result<String, minijinja::Error> {
    let seconds = seconds.clamp(RANGE.0, RANGE.1);
    let (days, second) = (seconds.div_euclid(86400), seconds.rem_euclid(86400));
    let (year, month, day, day_of_year) = civil(days);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let weekday = DAYS[days.rem_euclid(7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let hour12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        // `%-d` has no leading zeros.
        let padded = directive != Some('-');
        if !padded {
            directive = chars.next();
        }
        let number = |n: i64, width: usize| match padded {
            true => format!("{n:0width$}"),
            false => n.to_string(),
        };
        out += &match directive {
            Some('Y') => year.to_string(),
            Some('y') => number(year % 100, 2),
            Some('m') => number(month, 2),
            Some('d') => number(day, 2),
            Some('H') => number(hour, 2),
            Some('I') => number(hour12, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second % 60, 2),
            Some('j') => number(day_of_year, 3),
            Some('B') => month_name.into(),
            Some('b' | 'h') => month_name[..3].into(),
            Some('A') => weekday.into(),
            Some('a') => weekday[..3].into(),
            Some('p') => (if hour < 12 { "AM" } else { "PM" }).into(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{:02}", second % 60),
            Some('Z') => "UTC".into(),
            Some('z') => "+0000".into(),
            Some('%') => "%".into(),
            other => {
                let name = other.map_or(String::new(), String::from);
                return Err(super::invalid(format!("strftime_now does not know the directive '%{name}'")));
            }
        };
    }
    Ok(out)
}

/// Year, month, day and day of the year of a day since 1970. It counts years from March, so that the leap day
/// is the last of a year.
fn civil(days: i64) -> (i64, i64, i64, i64) {
    let days = days + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][month as usize - 1];
    (year, month, day, before + day + i64::from(leap && month > 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_python_writes_them() {
        let f = |s, t| format(s, t).unwrap();
        assert_eq!(f(1_795_824_000, "%A %d %B %Y, %H:%M:%S %j"), "Saturday 28 November 2026, 00:00:00 332");
        assert_eq!(
            f(951_782_400 + 13 * 3600 + 5, "%a %-d %b %y %I:%M:%S %p %j"),
            "Tue 29 Feb 00 01:00:05 PM 060"
        );
        assert_eq!(f(-1, "%F %T %%"), "1969-12-31 23:59:59 %");
        assert_eq!(f(i64::MAX, "%Y"), "9999");
        assert_eq!(f(i64::MIN, "%Y"), "1");
        assert!(format(0, "%Q").unwrap_err().to_string().contains("'%Q'"));
        assert!(format(0, "%").is_err());
    }
}
