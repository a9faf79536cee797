"""Which of torch's libraries multiplies faster on this machine; the library uses what this finds."""

from pathlib import Path

from moe.inspection.tables import format_table
from moe.kernels.product_choice import cache_file, save_measurement
from moe.kernels.product_measurement import Measurement, measure_products


def run_products(json: Path | None = None) -> Measurement:
    """Measures, prints a table, and saves the result, for this machine and in a separate file.

    Args:
        json: A file for the environment variable STMOE_PRODUCTS; None for none.
    """
    measurement = measure_products()
    save_measurement(measurement, cache_file())
    if json is not None:
        save_measurement(measurement, json)

    print(format_measurement(measurement))
    print(f"Saved for the next processes in {cache_file()}.")
    return measurement


def format_measurement(measurement: Measurement) -> str:
    """Returns the measurement as text."""
    rows = []
    for entry in measurement.times:
        rows.append(
            [
                entry.kind.replace("_", " "),
                entry.tokens,
                f"{entry.blas:.2f}",
                f"{entry.onednn:.2f}",
                entry.faster,
            ]
        )
    header = ["product", "tokens", "BLAS ms", "oneDNN ms", "used"]
    machine = f"{measurement.processor}, 1 thread, torch {measurement.torch}, float32"

    copy_time = measurement.copy_time
    way = "a copy" if measurement.choice.copies_expert_gradient else "as it lies"
    copies = (
        f"gradient of an expert's weights in bfloat16: {copy_time.as_it_lies:.2f} ms as it lies, "
        f"{copy_time.copied:.2f} ms of a copy; used: {way}"
    )
    return f"{machine}\n{format_table(header, rows)}\n{copies}"
