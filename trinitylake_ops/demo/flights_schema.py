"""The columns of the flights data set, in the CSV files and in the cleaned and derived tables.

Types are those that Spark, Parquet and Iceberg have in common: 32-bit and 64-bit integers, doubles, strings, booleans,
dates and timestamps in UTC. All columns are nullable; checks reject nulls where necessary. Columns of the source keep
their names, and their comments contain the units. Names of derived columns contain the unit.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

_TYPES: dict[str, DataType] = {
    "boolean": BooleanType(),
    "date": DateType(),
    "double": DoubleType(),
    "int": IntegerType(),
    "long": LongType(),
    "string": StringType(),
    "timestamp": TimestampType(),
}


def _schema(columns: str) -> StructType:
    """Parse lines of the form ``name type [comment]``."""
    fields = []
    for line in columns.strip().splitlines():
        name, type_name, *comment = line.split(maxsplit=2)
        fields.append(StructField(name, _TYPES[type_name], True, {"comment": comment[0]} if comment else None))
    return StructType(fields)


def conform(frame: DataFrame, schema: StructType) -> DataFrame:
    """Select the columns of ``schema``, in its order, with its types and comments.

    Args:
        frame: The rows.
        schema: The schema.
    """
    return frame.select(
        *(F.col(field.name).cast(field.dataType).alias(field.name, metadata=field.metadata) for field in schema)
    )


#: The columns of the five CSV files, in order.
CSV_SCHEMAS = {
    "airlines": _schema("carrier string\nname string"),
    "airports": _schema("faa string\nname string\nlat double\nlon double\nalt int\ntz int\ndst string\ntzone string"),
    "planes": _schema(
        "tailnum string\nyear int\ntype string\nmanufacturer string\nmodel string\nengines int\nseats int\n"
        "speed int\nengine string"
    ),
    "weather": _schema(
        "origin string\nyear int\nmonth int\nday int\nhour int\ntemp double\ndewp double\nhumid double\n"
        "wind_dir int\nwind_speed double\nwind_gust double\nprecip double\npressure double\nvisib double\n"
        "time_hour timestamp"
    ),
    "flights": _schema(
        "year int\nmonth int\nday int\ndep_time int\nsched_dep_time int\ndep_delay int\narr_time int\n"
        "sched_arr_time int\narr_delay int\ncarrier string\nflight int\ntailnum string\norigin string\n"
        "dest string\nair_time int\ndistance int\nhour int\nminute int\ntime_hour timestamp"
    ),
}

AIRLINES = _schema("""
carrier string two-letter code
name    string
""")

AIRPORTS = _schema("""
faa   string three-letter code
name  string
lat   double degrees north
lon   double degrees east
alt   int    feet above sea level
tz    int    hours from UTC, without summer time
dst   string kind of summer time: A (United States), U (unknown), N (none)
tzone string IANA time zone
""")

PLANES = _schema("""
tailnum      string registration
year_built   int
type         string
manufacturer string one spelling for each maker
model        string
engines      int
seats        int
speed        int    cruising speed in miles per hour
engine       string
""")

WEATHER = _schema("""
origin     string    airport where it was observed
time_hour  timestamp hour of the observation, UTC
year       int       of the local hour
month      int       of the local hour
day        int       of the local hour
hour       int       local; one hour of the year comes twice
temp       double    degrees Fahrenheit
dewp       double    degrees Fahrenheit
humid      double    percent
wind_dir   int       degrees
wind_speed double    miles per hour; null where the instrument gave an impossible one
wind_gust  double    miles per hour; null where the instrument gave an impossible one
precip     double    inches in the hour
pressure   double    millibars
visib      double    miles
""")

FLIGHTS = _schema("""
flight_id      string    local date, carrier, number and origin of the flight
flight_date    date      local date of the scheduled departure
year           int       of flight_date
month          int       of flight_date
day            int       of flight_date
carrier        string
flight         int       flight number of the carrier
tailnum        string    registration of the aircraft
origin         string
dest           string
sched_dep_at   timestamp scheduled departure, UTC
dep_at         timestamp departure, UTC; null if there was none
sched_dep_time int       local, as hours * 100 + minutes
dep_time       int       local, as hours * 100 + minutes
dep_delay      int       minutes; negative is early
sched_arr_time int       local, as hours * 100 + minutes
arr_time       int       local, as hours * 100 + minutes
arr_delay      int       minutes; negative is early
air_time       int       minutes
distance       int       miles
cancelled      boolean   never departed
hour           int       local hour of the scheduled departure
minute         int       minute of the scheduled departure
time_hour      timestamp hour of the scheduled departure, UTC; joins weather
""")

DELAY_BY_CARRIER_MONTH = _schema("""
year                         int
month                        int
carrier                      string
carrier_name                 string
flights                      long   scheduled
cancelled                    long   never departed
arrived                      long   with a known arrival delay
mean_dep_delay_min           double
mean_arr_delay_min           double
dep_delayed_over_15_min      long   departed more than 15 minutes late
share_dep_delayed_over_15_min double of those departed
flights_with_weather         long   with an observation for their hour and origin
mean_wind_speed_mph          double over flights, not hours
mean_precip_in               double over flights, not hours
mean_visib_mi                double over flights, not hours
flights_in_bad_weather       long   rain or snow, strong wind or poor visibility at departure
share_in_bad_weather         double of flights_with_weather
mean_dep_delay_bad_weather_min double of those that departed in bad weather
""")

ROUTE_PERFORMANCE = _schema("""
year                int
month               int
origin              string
dest                string
dest_name           string  null where the airport is not known
flights             long    scheduled
cancelled           long    never departed
flown               long    with a known air time
mean_air_time_min   double
mean_speed_mph      double  all distance over all air time
dep_delay_p50_min   double
dep_delay_p90_min   double
arr_delay_p50_min   double
arr_delay_p90_min   double
distance_mi         int     as the flights report it, the largest if they differ
great_circle_mi     double  from the airports' positions
distance_error_mi   double  distance_mi - great_circle_mi
distance_agrees     boolean null where the airport is not known
""")

AIRCRAFT_UTILISATION = _schema("""
year         int
month        int
tailnum      string
manufacturer string null where the aircraft is not known, like all that follows from it
model        string
age_years    int
seats        int
flights      long   scheduled
flown        long   with a known air time
air_min      long
distance_mi  long   of those flown
days_flown   long
destinations long   different ones flown to
seats_flown  long   seats offered on all that flew
""")
