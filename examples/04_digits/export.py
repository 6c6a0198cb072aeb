"""Extract the handwritten digits from scikit-learn's wheel, as images.npy (1797 x 8 x 8 float32, 0 to 1) and labels.npy
(int64).

usage: export.py WHEEL FOLDER
"""

import csv
import gzip
import io
import os
import struct
import sys
import zipfile


def write_npy(path, code, kind, shape, values):
    header = f"{{'descr': '{code}', 'fortran_order': False, 'shape': {shape}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    with open(path + ".part", "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + struct.pack(f"<{len(values)}{kind}", *values))
    os.replace(path + ".part", path)


def main():
    wheel, folder = sys.argv[1:]
    with zipfile.ZipFile(wheel) as archive:
        text = gzip.decompress(archive.read("sklearn/datasets/data/digits.csv.gz")).decode()
    rows = [[float(x) for x in row] for row in csv.reader(io.StringIO(text))]
    if len(rows) != 1797 or any(len(row) != 65 for row in rows):
        sys.exit(f"{wheel}: expected 1797 digits, got {len(rows)}")
    os.makedirs(folder, exist_ok=True)
    write_npy(os.path.join(folder, "images.npy"), "<f4", "f", (1797, 8, 8), [x / 16 for row in rows for x in row[:64]])
    write_npy(os.path.join(folder, "labels.npy"), "<i8", "q", (1797,), [int(row[64]) for row in rows])


main()
