"""`python -m benchmarks.fuzz`"""

from benchmarks.fuzz.campaign import main

if __name__ == "__main__":
    main()
