"""Entry points of the machine: PTX with arguments, host code of CuTe DSL, and full scripts with torch."""
