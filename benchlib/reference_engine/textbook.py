"""Textbook code for the embedded engine's training: many small, varied, correct Python functions.

Each entry of a chapter below holds names, parameters, words that may be renamed, how its arguments
are drawn, one-line descriptions (`$x` is a parameter) and one or more bodies. The first body
computes the expected values that the tests of the rendered function state.
"""

# ruff: noqa: E501, SIM905
from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

# ## names | parameters: annotation, ... -> annotation | renames | argument kinds
CHAPTERS: dict[str, str] = {}
CHAPTERS["numbers"] = """
## fib fibonacci fib_number nth_fib | n:int -> int | n=n,k,index,count a=a,x,prev b=b,y,cur,nxt | i0-15
Return Fibonacci number $n.
The $n-th Fibonacci number, counting from zero.
Compute the Fibonacci sequence at position $n.
---
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
---
    if n < 2:
        return n
    return F(n - 1) + F(n - 2)
---
    if n <= 1:
        return n
    a, b = 0, 1
    while n > 1:
        a, b = b, a + b
        n -= 1
    return b
## factorial fact fac product_to | n:int -> int | n=n,k,number,limit result=result,out,product i=i,j,factor | i0-9
Return the factorial of $n.
Multiply the whole numbers from 1 to $n.
The product 1 * 2 * ... * $n.
---
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result
---
    if n == 0:
        return 1
    return n * F(n - 1)
---
    result = 1
    while n > 1:
        result = result * n
        n -= 1
    return result
## gcd greatest_common_divisor common_divisor | a:int b:int -> int | a=a,x,m,left b=b,y,n,right | i4-90 i4-90
Greatest common divisor of $a and $b by Euclid's algorithm.
Return the largest number that divides both $a and $b.
Euclid: replace the larger number by the remainder.
---
    while b:
        a, b = b, a % b
    return a
---
    if b == 0:
        return a
    return F(b, a % b)
---
    while a != b:
        if a > b:
            a -= b
        else:
            b -= a
    return a
## lcm least_common_multiple common_multiple | a:int b:int -> int | a=a,x,p b=b,y,q step=step,big,larger | i2-24 i2-24
Least common multiple of $a and $b.
The smallest positive number that both $a and $b divide.
---
    step = max(a, b)
    multiple = step
    while multiple % a or multiple % b:
        multiple += step
    return multiple
---
    x, y = a, b
    while y:
        x, y = y, x % y
    return a * b // x
## is_prime prime check_prime | n:int -> bool | n=n,k,number,value d=d,i,divisor,f | i2-99
True when $n has no divisor but 1 and itself.
Tell whether $n is a prime number.
Trial division up to the square root of $n.
---
    if n < 2:
        return False
    d = 2
    while d * d <= n:
        if n % d == 0:
            return False
        d += 1
    return True
---
    if n < 2:
        return False
    for d in range(2, int(n**0.5) + 1):
        if n % d == 0:
            return False
    return True
---
    return n > 1 and all(n % d for d in range(2, n))
## primes_below sieve primes eratosthenes | limit:int -> list[int] | limit=limit,n,bound,top p=p,i,prime flags=flags,is_prime,sieve | i5-40
Every prime below $limit, by the sieve of Eratosthenes.
List the prime numbers smaller than $limit.
---
    flags = [True] * limit
    found = []
    for p in range(2, limit):
        if flags[p]:
            found.append(p)
            for multiple in range(p * p, limit, p):
                flags[multiple] = False
    return found
---
    found = []
    for p in range(2, limit):
        if all(p % q for q in found):
            found.append(p)
    return found
## prime_factors factorize factors | n:int -> list[int] | n=n,number,k,rest p=p,d,divisor out=out,result,found | i4-120
Split $n into its prime factors, smallest first.
The primes whose product is $n.
---
    out = []
    p = 2
    while n > 1:
        while n % p == 0:
            out.append(p)
            n //= p
        p += 1
    return out
---
    out = []
    p = 2
    while p * p <= n:
        if n % p:
            p += 1
        else:
            out.append(p)
            n //= p
    if n > 1:
        out.append(n)
    return out
## divisors all_divisors list_divisors | n:int -> list[int] | n=n,number,value d=d,i,k | i4-60
All positive divisors of $n in order.
The numbers that divide $n without remainder.
---
    return [d for d in range(1, n + 1) if n % d == 0]
---
    found = []
    for d in range(1, n + 1):
        if n % d == 0:
            found.append(d)
    return found
## digit_sum sum_digits cross_sum | n:int -> int | n=n,number,value total=total,s,acc digit=digit,d,last | i10-9999
Add the decimal digits of $n.
The sum of all digits of $n.
---
    total = 0
    while n:
        n, digit = divmod(n, 10)
        total += digit
    return total
---
    return sum(int(digit) for digit in str(n))
---
    if n < 10:
        return n
    return n % 10 + F(n // 10)
## reverse_number flip_digits mirrored | n:int -> int | n=n,number,value out=out,result,flipped | i10-9999
Write the digits of $n backwards.
Reverse the decimal digits of $n.
---
    out = 0
    while n:
        out = out * 10 + n % 10
        n //= 10
    return out
---
    return int(str(n)[::-1])
## power fast_power raise_to | base:int exponent:int -> int | base=base,b,x exponent=exponent,e,n,times result=result,out,acc | i2-9 i0-6
Raise $base to the power $exponent by squaring.
Compute $base ** $exponent with few multiplications.
---
    result = 1
    while exponent > 0:
        if exponent % 2 == 1:
            result *= base
        base *= base
        exponent //= 2
    return result
---
    if exponent == 0:
        return 1
    half = F(base, exponent // 2)
    if exponent % 2:
        return half * half * base
    return half * half
## collatz_steps collatz hailstone_length | n:int -> int | n=n,number,value steps=steps,count,length | i2-40
Count the Collatz steps from $n down to 1.
How many times must $n be halved or tripled to reach 1?
---
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps
---
    if n == 1:
        return 0
    if n % 2 == 0:
        return 1 + F(n // 2)
    return 1 + F(3 * n + 1)
## integer_sqrt isqrt floor_root | n:int -> int | n=n,number,value low=low,lo,left high=high,hi,right | i2-400
Largest whole number whose square is at most $n.
Floor of the square root of $n, found by halving.
---
    low, high = 0, n
    while low < high:
        middle = (low + high + 1) // 2
        if middle * middle <= n:
            low = middle
        else:
            high = middle - 1
    return low
---
    root = 0
    while (root + 1) * (root + 1) <= n:
        root += 1
    return root
## to_binary binary bits_of | n:int -> str | n=n,number,value bits=bits,digits,out | i1-99
Write $n in base two.
The binary digits of $n as text.
---
    bits = ""
    while n > 0:
        bits = str(n % 2) + bits
        n //= 2
    return bits or "0"
---
    if n < 2:
        return str(n)
    return F(n // 2) + str(n % 2)
## binomial choose combinations | n:int k:int -> int | n=n,total,size k=k,pick,taken result=result,out,ways | i4-12 i1-4
Number of ways to choose $k out of $n.
The binomial coefficient of $n over $k.
---
    result = 1
    for i in range(1, k + 1):
        result = result * (n - i + 1) // i
    return result
---
    if k == 0 or k == n:
        return 1
    return F(n - 1, k - 1) + F(n - 1, k)
## triangular triangle_number sum_to | n:int -> int | n=n,k,limit total=total,s,acc | i3-40
Sum of the whole numbers from 1 to $n.
The $n-th triangular number.
---
    return n * (n + 1) // 2
---
    total = 0
    for i in range(1, n + 1):
        total += i
    return total
---
    return n + F(n - 1) if n > 0 else 0
"""
CHAPTERS["sorting"] = """
## quicksort quick_sort qsort sort_quick | items:list[int] -> list[int] | items=items,values,numbers,data pivot=pivot,middle,p smaller=smaller,left,low,below larger=larger,right,high,above x=x,v,item | l4-7
Sort $items by splitting around a pivot.
Return $items in ascending order with quicksort.
Divide $items at a pivot and sort both sides.
---
    if len(items) <= 1:
        return items
    pivot = items[0]
    smaller = [x for x in items[1:] if x < pivot]
    larger = [x for x in items[1:] if x >= pivot]
    return F(smaller) + [pivot] + F(larger)
---
    if len(items) < 2:
        return list(items)
    pivot = items[len(items) // 2]
    smaller = [x for x in items if x < pivot]
    equal = [x for x in items if x == pivot]
    larger = [x for x in items if x > pivot]
    return F(smaller) + equal + F(larger)
---
    if not items:
        return []
    pivot, *rest = items
    smaller, larger = [], []
    for x in rest:
        if x < pivot:
            smaller.append(x)
        else:
            larger.append(x)
    return F(smaller) + [pivot] + F(larger)
## partition split_at split_around | items:list[int] pivot:int -> tuple[list[int],list[int]] | items=items,values,numbers,data pivot=pivot,limit,bound x=x,v,item small=small,low,left large=large,high,right | l4-7 i10-60
Split $items into those below $pivot and the others.
Numbers smaller than $pivot first, the rest second.
---
    small = [x for x in items if x < pivot]
    large = [x for x in items if x >= pivot]
    return small, large
---
    small, large = [], []
    for x in items:
        (small if x < pivot else large).append(x)
    return small, large
## merge merge_sorted join_sorted | left:list[int] right:list[int] -> list[int] | left=left,first,a right=right,second,b out=out,merged,result i=i,p j=j,q | s2-4 s2-4
Merge two sorted lists into one sorted list.
Combine $left and $right, both already in order.
---
    out = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            out.append(left[i])
            i += 1
        else:
            out.append(right[j])
            j += 1
    return out + left[i:] + right[j:]
---
    if not left or not right:
        return left or right
    if left[0] <= right[0]:
        return [left[0]] + F(left[1:], right)
    return [right[0]] + F(left, right[1:])
## merge_sort mergesort sort_by_merging | items:list[int] -> list[int] | items=items,values,numbers,data left=left,front,a right=right,back,b out=out,merged,result mid=mid,half,middle | l4-7
Sort $items by halving and merging.
Merge sort: sort both halves, then join them.
---
    if len(items) < 2:
        return list(items)
    mid = len(items) // 2
    left, right = F(items[:mid]), F(items[mid:])
    out = []
    while left and right:
        smallest = left if left[0] <= right[0] else right
        out.append(smallest.pop(0))
    return out + left + right
## insertion_sort insert_sort sort_by_insertion | items:list[int] -> list[int] | items=items,values,numbers,data out=out,result,ordered i=i,k j=j,pos,hole x=x,item,value | l4-6
Sort $items by inserting each into its place.
Insertion sort: grow an ordered list one item at a time.
---
    out = []
    for x in items:
        j = len(out)
        while j > 0 and out[j - 1] > x:
            j -= 1
        out.insert(j, x)
    return out
---
    out = list(items)
    for i in range(1, len(out)):
        x = out[i]
        j = i
        while j > 0 and out[j - 1] > x:
            out[j] = out[j - 1]
            j -= 1
        out[j] = x
    return out
## selection_sort select_sort sort_by_selection | items:list[int] -> list[int] | items=items,values,numbers,data out=out,result,ordered i=i,k,start best=best,smallest,m | l4-6
Sort $items by choosing the smallest again and again.
Selection sort: put the minimum first, then the next.
---
    out = list(items)
    for i in range(len(out)):
        best = min(range(i, len(out)), key=out.__getitem__)
        out[i], out[best] = out[best], out[i]
    return out
---
    rest = list(items)
    out = []
    while rest:
        best = min(rest)
        rest.remove(best)
        out.append(best)
    return out
## bubble_sort bubblesort sort_by_swapping | items:list[int] -> list[int] | items=items,values,numbers,data out=out,result,ordered i=i,k swapped=swapped,changed,again | l4-6
Sort $items by swapping neighbours until none is out of order.
Bubble sort: large numbers rise to the end.
---
    out = list(items)
    swapped = True
    while swapped:
        swapped = False
        for i in range(len(out) - 1):
            if out[i] > out[i + 1]:
                out[i], out[i + 1] = out[i + 1], out[i]
                swapped = True
    return out
---
    out = list(items)
    for end in range(len(out) - 1, 0, -1):
        for i in range(end):
            if out[i] > out[i + 1]:
                out[i], out[i + 1] = out[i + 1], out[i]
    return out
## is_sorted in_order ascending | items:list[int] -> bool | items=items,values,numbers,data a=a,x,left b=b,y,right i=i,k | s3-6
True when no item of $items is smaller than the one before.
Check that $items never decreases.
---
    return all(a <= b for a, b in zip(items, items[1:]))
---
    for i in range(1, len(items)):
        if items[i - 1] > items[i]:
            return False
    return True
## counting_sort count_sort sort_digits | items:list[int] -> list[int] | items=items,values,digits,data counts=counts,seen,tally x=x,v,digit out=out,result | d5-8
Sort small whole numbers by counting each.
Counting sort for digits between 0 and 9.
---
    counts = [0] * 10
    for x in items:
        counts[x] += 1
    out = []
    for x, times in enumerate(counts):
        out.extend([x] * times)
    return out
---
    counts = {}
    for x in items:
        counts[x] = counts.get(x, 0) + 1
    return [x for x in sorted(counts) for _ in range(counts[x])]
## binary_search find_sorted bisect_search | items:list[int] target:int -> int | items=items,values,numbers,data target=target,wanted,key low=low,lo,left high=high,hi,right mid=mid,m,middle | s4-7 v
Index of $target in the sorted list $items, or -1.
Halve the range until $target is found.
---
    low, high = 0, len(items) - 1
    while low <= high:
        mid = (low + high) // 2
        if items[mid] == target:
            return mid
        if items[mid] < target:
            low = mid + 1
        else:
            high = mid - 1
    return -1
## kth_smallest select_kth quickselect | items:list[int] k:int -> int | items=items,values,numbers,data k=k,n,rank pivot=pivot,p,middle small=small,below,left x=x,v,item | l5-7 i0-4
The number at place $k once $items is sorted.
Find the $k-th smallest item without sorting everything.
---
    pivot = items[0]
    small = [x for x in items if x < pivot]
    equal = items.count(pivot)
    if k < len(small):
        return F(small, k)
    if k < len(small) + equal:
        return pivot
    return F([x for x in items if x > pivot], k - len(small) - equal)
## heap_sort heapsort sort_with_heap | items:list[int] -> list[int] | items=items,values,numbers,data heap=heap,tree,queue child=child,i,node parent=parent,up,above out=out,result,ordered | l4-6
Sort $items by pushing all to a heap and popping the smallest.
Heap sort with a heap kept in a list.
---
    heap = []
    for value in items:
        heap.append(value)
        child = len(heap) - 1
        while child > 0 and heap[child] < heap[(child - 1) // 2]:
            parent = (child - 1) // 2
            heap[child], heap[parent] = heap[parent], heap[child]
            child = parent
    out = []
    while heap:
        out.append(heap.pop(heap.index(min(heap))))
    return out
## sort_by_length by_length shortest_first | words:list[str] -> list[str] | words=words,names,items,texts w=w,word,s | W3-5
Words in order of length, equal lengths by alphabet.
Sort $words from short to long.
---
    return sorted(words, key=lambda w: (len(w), w))
---
    out = list(words)
    out.sort()
    out.sort(key=len)
    return out
## median middle_value middle_of | items:list[int] -> float | items=items,values,numbers,data ordered=ordered,ranked,s half=half,mid,m | l3-6
The middle of $items once sorted.
Median: half of the numbers are smaller.
---
    ordered = sorted(items)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return float(ordered[half])
    return (ordered[half - 1] + ordered[half]) / 2
"""
CHAPTERS["strings"] = """
## reverse_text reverse backwards | text:str -> str | text=text,s,word,line out=out,result c=c,ch,letter | w
Return $text from its end to its start.
Write $text backwards.
---
    return text[::-1]
---
    out = ""
    for c in text:
        out = c + out
    return out
---
    if text == "":
        return ""
    return F(text[1:]) + text[0]
## is_palindrome palindrome same_backwards | text:str -> bool | text=text,s,word i=i,left j=j,right | p
True when $text reads the same both ways.
Does $text equal its mirror image?
---
    return text == text[::-1]
---
    i, j = 0, len(text) - 1
    while i < j:
        if text[i] != text[j]:
            return False
        i, j = i + 1, j - 1
    return True
---
    if len(text) < 2:
        return True
    return text[0] == text[-1] and F(text[1:-1])
## count_vowels vowels vowel_count | text:str -> int | text=text,s,word,line c=c,ch,letter n=n,total,count | w
Number of vowels in $text.
Count how often a, e, i, o and u occur.
---
    return sum(1 for c in text if c in "aeiou")
---
    n = 0
    for c in text.lower():
        if c in "aeiou":
            n += 1
    return n
## letter_counts count_letters tally | text:str -> dict[str,int] | text=text,s,word counts=counts,seen,table c=c,ch,letter | w
How often each letter occurs in $text.
Map every character of $text to its number of uses.
---
    counts = {}
    for c in text:
        counts[c] = counts.get(c, 0) + 1
    return counts
---
    return {c: text.count(c) for c in text}
## caesar shift_letters rotate_text | text:str shift:int -> str | text=text,s,word,message shift=shift,key,step out=out,result,coded c=c,ch,letter | w i1-12
Move each letter of $text by $shift places.
Caesar cipher for lower-case letters.
---
    out = []
    for c in text:
        place = (ord(c) - ord("a") + shift) % 26
        out.append(chr(place + ord("a")))
    return "".join(out)
---
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    return "".join(alphabet[(alphabet.index(c) + shift) % 26] for c in text)
## run_lengths compress encode_runs | text:str -> str | text=text,s,data out=out,result,parts c=c,ch,letter n=n,count,length | r
Replace each run of a letter by the letter and its length.
Run-length encoding of $text.
---
    out = ""
    i = 0
    while i < len(text):
        j = i
        while j < len(text) and text[j] == text[i]:
            j += 1
        out += text[i] + str(j - i)
        i = j
    return out
## title_case capitalize_words headline | words:list[str] -> str | words=words,names,parts w=w,word,part | W2-4
Join $words with a capital letter at each start.
Make a headline of $words.
---
    return " ".join(w[0].upper() + w[1:] for w in words)
---
    parts = []
    for w in words:
        parts.append(w.capitalize())
    return " ".join(parts)
## longest_word longest widest | words:list[str] -> str | words=words,names,items best=best,top,found w=w,word,name | W3-5
The longest of $words, the first of equals.
Find the word with the most letters.
---
    best = words[0]
    for w in words:
        if len(w) > len(best):
            best = w
    return best
---
    return max(words, key=len)
## remove_repeats unique_letters distinct | text:str -> str | text=text,s,word seen=seen,out,kept c=c,ch,letter | w
Keep only the first of each letter of $text.
Drop every letter that came before.
---
    seen = ""
    for c in text:
        if c not in seen:
            seen += c
    return seen
---
    return "".join(dict.fromkeys(text))
## are_anagrams anagrams same_letters | first:str second:str -> bool | first=first,a,left second=second,b,right | w w
True when $first and $second use the same letters.
Compare the sorted letters of two words.
---
    return sorted(first) == sorted(second)
---
    rest = list(second)
    for letter in first:
        if letter not in rest:
            return False
        rest.remove(letter)
    return not rest
## edit_distance levenshtein edits_between | a:str b:str -> int | a=a,s,left b=b,t,right row=row,line,last best=best,new,cur | w w
Fewest single-letter changes that turn $a into $b.
Levenshtein distance, one row at a time.
---
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        best = [i]
        for j, y in enumerate(b, 1):
            cost = 0 if x == y else 1
            best.append(min(row[j] + 1, best[j - 1] + 1, row[j - 1] + cost))
        row = best
    return row[-1]
---
    if not a or not b:
        return len(a) + len(b)
    if a[0] == b[0]:
        return F(a[1:], b[1:])
    return 1 + min(F(a[1:], b), F(a, b[1:]), F(a[1:], b[1:]))
## common_prefix shared_start prefix_of | a:str b:str -> str | a=a,s,first b=b,t,second n=n,i,size | w w
The longest start that $a and $b share.
Letters equal from the beginning of both words.
---
    n = 0
    while n < len(a) and n < len(b) and a[n] == b[n]:
        n += 1
    return a[:n]
## word_lengths lengths sizes | words:list[str] -> dict[str,int] | words=words,names,items w=w,word,name | W2-4
Map each word to its number of letters.
Lengths of all $words by name.
---
    return {w: len(w) for w in words}
---
    table = {}
    for w in words:
        table[w] = len(w)
    return table
"""
CHAPTERS["lists"] = """
## largest maximum find_max | items:list[int] -> int | items=items,values,numbers,data best=best,top,m x=x,v,item | l3-7
The largest number of $items.
Walk through $items and remember the maximum.
---
    best = items[0]
    for x in items[1:]:
        if x > best:
            best = x
    return best
---
    if len(items) == 1:
        return items[0]
    return max(items[0], F(items[1:]))
## total sum_all add_up | items:list[int] -> int | items=items,values,numbers,data acc=acc,s,result x=x,v,item | l3-6
Add all numbers of $items.
The sum of $items.
---
    acc = 0
    for x in items:
        acc += x
    return acc
---
    if not items:
        return 0
    return items[0] + F(items[1:])
## running_sums prefix_sums cumulative | items:list[int] -> list[int] | items=items,values,numbers,data acc=acc,s,so_far out=out,sums,result x=x,v,item | l3-5
Sums of the first one, two, three, ... items.
Each place holds the total of $items so far.
---
    out = []
    acc = 0
    for x in items:
        acc += x
        out.append(acc)
    return out
---
    return [sum(items[: i + 1]) for i in range(len(items))]
## mean average arithmetic_mean | items:list[int] -> float | items=items,values,numbers,data | l4-4
Average of $items.
The sum of $items divided by how many there are.
---
    return sum(items) / len(items)
---
    acc = 0
    for number in items:
        acc += number
    return acc / len(items)
## only_even evens even_numbers | items:list[int] -> list[int] | items=items,values,numbers,data x=x,v,item out=out,kept,result | l4-7
The even numbers of $items in their order.
Keep what two divides.
---
    return [x for x in items if x % 2 == 0]
---
    out = []
    for x in items:
        if x % 2 == 0:
            out.append(x)
    return out
## chunks split_into pieces | items:list[int] size:int -> list[list[int]] | items=items,values,numbers,data size=size,n,width i=i,k,start | l4-7 i2-3
Cut $items into lists of $size.
Groups of $size neighbours; the last may be shorter.
---
    return [items[i : i + size] for i in range(0, len(items), size)]
---
    out = []
    while items:
        out.append(items[:size])
        items = items[size:]
    return out
## flatten join_lists concat | rows:list[list[int]] -> list[int] | rows=rows,lists,nested row=row,part,inner x=x,v,item out=out,flat,result | m
One list of all numbers in $rows.
Put the inner lists after each other.
---
    return [x for row in rows for x in row]
---
    out = []
    for row in rows:
        out.extend(row)
    return out
## rotate shift_left rotate_left | items:list[int] k:int -> list[int] | items=items,values,numbers,data k=k,n,steps | l4-6 i1-3
Move the first $k items to the end.
Rotate $items to the left by $k places.
---
    return items[k:] + items[:k]
---
    out = list(items)
    for _ in range(k):
        out.append(out.pop(0))
    return out
## without_duplicates unique dedupe | items:list[int] -> list[int] | items=items,values,numbers,data seen=seen,known,before out=out,kept,result x=x,v,item | d5-8
The items in their order, each only once.
Drop repeated numbers from $items.
---
    seen = set()
    out = []
    for x in items:
        if x not in seen:
            seen.add(x)
            out.append(x)
    return out
---
    return list(dict.fromkeys(items))
## count_items tally_items frequencies | items:list[int] -> dict[int,int] | items=items,values,numbers,data table=table,counts,seen x=x,v,item | d5-8
How often each number occurs.
Count equal items of $items.
---
    table = {}
    for x in items:
        table[x] = table.get(x, 0) + 1
    return table
## two_sum pair_with_sum find_pair | items:list[int] target:int -> list[int] | items=items,values,numbers,data target=target,wanted,goal seen=seen,known,places i=i,k x=x,v,item | l4-6 i30-99
Places of two numbers that add up to $target, or nothing.
Find two items whose sum is $target.
---
    seen = {}
    for i, x in enumerate(items):
        if target - x in seen:
            return [seen[target - x], i]
        seen[x] = i
    return []
---
    for i in range(len(items)):
        for j in range(i):
            if items[i] + items[j] == target:
                return [j, i]
    return []
## best_run max_subarray largest_sum | items:list[int] -> int | items=items,values,numbers,data best=best,top,record here=here,cur,ending x=x,v,item | n4-7
Largest sum of neighbouring items.
Kadane's rule: extend the run or begin a new one.
---
    best = here = items[0]
    for x in items[1:]:
        here = max(x, here + x)
        best = max(best, here)
    return best
## differences gaps steps_between | items:list[int] -> list[int] | items=items,values,numbers,data a=a,x,left b=b,y,right | l4-6
How much each item exceeds the one before.
Differences of neighbours in $items.
---
    return [b - a for a, b in zip(items, items[1:])]
---
    return [items[i + 1] - items[i] for i in range(len(items) - 1)]
## coin_change fewest_coins min_coins | amount:int coins:list[int] -> int | amount=amount,total,target coins=coins,values,kinds best=best,need,table c=c,coin,v | i7-16 k
Smallest number of $coins that pays $amount.
Fewest coins, built up from small amounts.
---
    best = [0] + [amount + 1] * amount
    for s in range(1, amount + 1):
        for c in coins:
            if c <= s:
                best[s] = min(best[s], best[s - c] + 1)
    return best[amount]
---
    if amount == 0:
        return 0
    return 1 + min(F(amount - c, coins) for c in coins if c <= amount)
## subsets power_set all_subsets | items:list[int] -> list[list[int]] | items=items,values,numbers,data out=out,result,found x=x,v,item | l2-3
Every choice of some of $items, the empty one first.
Build all subsets, one item at a time.
---
    out = [[]]
    for x in items:
        out += [chosen + [x] for chosen in out]
    return out
"""
CHAPTERS["matrices and graphs"] = """
## transpose flip swap_axes | rows:list[list[int]] -> list[list[int]] | rows=rows,matrix,m,grid j=j,col,c row=row,r,line | m
Turn rows into columns.
Mirror the matrix $rows along its diagonal.
---
    return [list(column) for column in zip(*rows)]
---
    return [[row[j] for row in rows] for j in range(len(rows[0]))]
## add_matrices matrix_sum plus | a:list[list[int]] b:list[list[int]] -> list[list[int]] | a=a,x,left b=b,y,right i=i,r j=j,c | m m
Add $a and $b entry by entry.
Sum of two matrices of the same shape.
---
    return [[p + q for p, q in zip(r, s)] for r, s in zip(a, b)]
---
    out = []
    for i in range(len(a)):
        out.append([a[i][j] + b[i][j] for j in range(len(a[i]))])
    return out
## multiply matmul matrix_product | a:list[list[int]] b:list[list[int]] -> list[list[int]] | a=a,x,left b=b,y,right out=out,result,c i=i,r j=j,k | m m
Product of the matrices $a and $b.
Rows of $a times columns of $b.
---
    out = []
    for row in a:
        out.append([sum(p * q for p, q in zip(row, col)) for col in zip(*b)])
    return out
---
    out = [[0] * len(b[0]) for _ in a]
    for i in range(len(a)):
        for j in range(len(b[0])):
            for t in range(len(b)):
                out[i][j] += a[i][t] * b[t][j]
    return out
## determinant det det2 | m:list[list[int]] -> int | m=m,matrix,rows a=a,p b=b,q c=c,r d=d,s | m
Determinant of a matrix of two rows.
Cross products of the entries of $m.
---
    (a, b), (c, d) = m
    return a * d - b * c
---
    return m[0][0] * m[1][1] - m[0][1] * m[1][0]
## trace diagonal_sum main_diagonal | m:list[list[int]] -> int | m=m,matrix,rows i=i,k | m
Sum of the entries on the diagonal of $m.
Add $m[i][i] for every i.
---
    return sum(m[i][i] for i in range(len(m)))
---
    acc = 0
    for i, row in enumerate(m):
        acc += row[i]
    return acc
## dot inner_product scalar_product | u:list[int] v:list[int] -> int | u=u,a,left v=v,b,right x=x,p y=y,q | d3-3 d3-3
Sum of the products of matching entries.
Scalar product of $u and $v.
---
    return sum(x * y for x, y in zip(u, v))
---
    acc = 0
    for i in range(len(u)):
        acc += u[i] * v[i]
    return acc
## reachable bfs visit_all | graph:dict[int,list[int]] start:int -> list[int] | graph=graph,edges,links start=start,source,root queue=queue,todo,waiting seen=seen,found,order node=node,n,here | g i0-3
Nodes that a breadth-first search meets from $start.
Walk the graph level by level.
---
    seen = [start]
    queue = [start]
    while queue:
        node = queue.pop(0)
        for other in graph[node]:
            if other not in seen:
                seen.append(other)
                queue.append(other)
    return seen
## dfs depth_first explore | graph:dict[int,list[int]] start:int -> list[int] | graph=graph,edges,links start=start,source,root stack=stack,todo,pending order=order,seen,visited node=node,n,here | g i0-3
Nodes in depth-first order from $start.
Follow each branch to its end before the next.
---
    order = []
    stack = [start]
    while stack:
        node = stack.pop()
        if node in order:
            continue
        order.append(node)
        stack.extend(reversed(graph[node]))
    return order
## distance shortest_path hops | graph:dict[int,list[int]] start:int goal:int -> int | graph=graph,edges,links start=start,source,a goal=goal,target,b level=level,front,layer steps=steps,d,length | g i0-3 i0-3
Fewest edges from $start to $goal, or -1.
Length of the shortest path in the graph.
---
    level, seen, steps = {start}, {start}, 0
    while level:
        if goal in level:
            return steps
        level = {n for node in level for n in graph[node]} - seen
        seen |= level
        steps += 1
    return -1
## edge_count count_edges number_of_edges | graph:dict[int,list[int]] -> int | graph=graph,edges,links node=node,n,v | g
How many arrows the graph has.
Add the numbers of neighbours.
---
    return sum(len(graph[node]) for node in graph)
---
    acc = 0
    for neighbours in graph.values():
        acc += len(neighbours)
    return acc
## degree_table in_degrees arrows_in | graph:dict[int,list[int]] -> dict[int,int] | graph=graph,edges,links node=node,n,v table=table,count,result | g
For each node the number of edges that end there.
Count incoming edges of the graph.
---
    table = {node: 0 for node in graph}
    for node in graph:
        for other in graph[node]:
            table[other] += 1
    return table
## grid_paths count_paths lattice_paths | rows:int cols:int -> int | rows=rows,height,h cols=cols,width,w line=line,row,ways | i2-6 i2-6
Ways from one corner of a grid to the other.
Count paths that go only right or down.
---
    line = [1] * cols
    for _ in range(rows - 1):
        for i in range(1, cols):
            line[i] += line[i - 1]
    return line[-1]
---
    if rows == 1 or cols == 1:
        return 1
    return F(rows - 1, cols) + F(rows, cols - 1)
"""
_WORDS = (
    "apple stone river cloud bread table green light music paper garden window silver forest orange bridge planet "
    "letter summer winter coffee basket button castle dragon engine feather hammer island jacket kettle ladder mirror "
    "needle pepper rabbit saddle tunnel violet wagon yellow anchor banana candle desert falcon guitar harbor lantern "
    "marble noodle oyster pencil rocket sailor temple valley walnut zebra copper meadow"
).split()
_MIRRORS = "level radar civic noon refer rotor madam kayak stats deed".split()
_TITLES = {
    "numbers": "whole numbers|integer helpers|number theory|small number functions|arithmetic in Python",
    "sorting": "sorting lists|sorting algorithms|ways to sort|order and search|sort helpers",
    "strings": "working with text|string helpers|words and letters|text functions",
    "lists": "list helpers|working with lists|functions on lists|loops over numbers",
    "matrices and graphs": "matrices and graphs|grids and graphs|tables of numbers|small graph functions",
}
_WORD = re.compile(r"[A-Za-z_]\w*")
_PARAM = re.compile(r"\$(\w+)")


@dataclass(frozen=True)
class Entry:
    """One algorithm: its names, texts and bodies."""

    names: list[str]
    params: list[tuple[str, str]]
    returns: str
    renames: dict[str, list[str]]
    kinds: list[str]
    docs: list[str]
    bodies: list[str]
    solve: Callable[..., Any] = field(repr=False)


def _define(params: list[tuple[str, str]], body: str) -> Callable[..., Any]:
    """Compile a body as a function F."""
    scope: dict[str, Any] = {}
    exec(f"def F({', '.join(p for p, _ in params)}):\n{body}\n", scope)
    function: Callable[..., Any] = scope["F"]
    return function


def _parse(block: str) -> Entry:
    """Read one entry."""
    head, *rest = block.strip("\n").split("\n")
    names, signature, renames, kinds = (part.strip() for part in head.split(" | "))
    inputs, returns = signature.split(" -> ")
    params = [(p.split(":")[0], p.split(":")[1]) for p in inputs.split()]
    docs, *bodies = "\n".join(rest).split("\n---\n")
    table = {r.split("=")[0]: r.split("=")[1].split(",") for r in renames.split()}
    return Entry(
        names.split(),
        params,
        returns.replace(",", ", "),
        table,
        kinds.split(),
        docs.split("\n"),
        bodies,
        _define(params, bodies[0]),
    )


@cache
def chapters() -> dict[str, list[Entry]]:
    """All entries by chapter, in the order in which a file presents them."""
    split = {k: text.split("\n## ") for k, text in CHAPTERS.items()}
    return {k: [_parse(b) for b in blocks if b.strip()] for k, blocks in split.items()}


def _span(kind: str) -> tuple[int, int]:
    """Bounds in an argument kind such as `i0-15`."""
    low, high = kind[1:].split("-")
    return int(low), int(high)


def _graph(rng: random.Random) -> dict[int, list[int]]:
    """Draw a small directed graph."""
    return {n: sorted(rng.sample([m for m in range(4) if m != n], rng.randint(1, 2))) for n in range(4)}


def _argument(rng: random.Random, kind: str, before: list[Any]) -> Any:
    """Draw one argument of a kind."""
    match kind[0]:
        case "i":
            return rng.randint(*_span(kind))
        case "l" | "s" | "d" | "n":
            low, high = {"d": (0, 9), "n": (-9, 12)}.get(kind[0], (1, 99))
            drawn = [rng.randint(low, high) for _ in range(rng.randint(*_span(kind)))]
            return sorted(drawn) if kind[0] == "s" else drawn
        case "v":
            return rng.choice(before[0]) if rng.random() < 0.8 else rng.randint(1, 99)
        case "w":
            return rng.choice(_WORDS)
        case "W":
            return rng.sample(_WORDS, rng.randint(*_span(kind)))
        case "p":
            return rng.choice(_MIRRORS if rng.random() < 0.5 else _WORDS)
        case "r":
            return "".join(rng.choice("abxyz") * rng.randint(1, 4) for _ in range(rng.randint(2, 4)))
        case "m":
            return [[rng.randint(0, 9) for _ in range(2)] for _ in range(2)]
        case "k":
            return [1, *sorted(rng.sample([2, 3, 4, 5, 7], 2))]
        case _:
            return _graph(rng)


def _cases(rng: random.Random, entry: Entry, count: int) -> list[tuple[str, str]]:
    """Argument lists and expected values, as text."""
    drawn: dict[str, str] = {}
    for _ in range(count):
        args: list[Any] = []
        for kind in entry.kinds:
            args.append(_argument(rng, kind, args))
        drawn[", ".join(map(repr, args))] = repr(entry.solve(*args))
    return sorted(drawn.items(), key=lambda case: (len(case[0]), case[0]))


def _rename(rng: random.Random, entry: Entry, name: str) -> dict[str, str]:
    """Choose words for an entry's names; a clash keeps the word as it is."""
    table = {"F": name}
    taken = set(entry.renames) | {name}
    for old, options in entry.renames.items():
        new = rng.choice(options)
        table[old] = old if new in taken or new in entry.names else new
        taken.add(table[old])
    return table


@dataclass(frozen=True)
class _Style:
    """What one file keeps the same."""

    tests: str
    typed: bool


def _tests(style: _Style, name: str, cases: list[tuple[str, str]]) -> str:
    """Lines after a function that state what it returns."""
    if style.tests == "assert":
        return "\n" + "".join(f"\nassert {name}({a}) == {r}" for a, r in cases) + "\n"
    if style.tests == "test":
        lines = "".join(f"    assert {name}({a}) == {r}\n" for a, r in cases)
        return f"\n\n\ndef test_{name}() -> None:\n{lines}"
    if style.tests == "print":
        return "\n" + "".join(f"\nprint({name}({a}))  # {r}" for a, r in cases) + "\n"
    return "\n"


def function(rng: random.Random, entry: Entry, style: _Style) -> str:
    """Render one function with its description and tests."""
    name = rng.choice(entry.names)
    body = rng.choice(entry.bodies)
    table = _rename(rng, entry, name)
    locals_ = set(_WORD.findall(body))
    if any(new in locals_ and old != new for old, new in table.items()):
        table = {"F": name}
    body = _WORD.sub(lambda m: table.get(m[0], m[0]), body)
    doc = _PARAM.sub(lambda m: table.get(m[1], m[1]), rng.choice(entry.docs))
    params = [(table.get(p, p), t.replace(",", ", ")) for p, t in entry.params]
    signature = ", ".join(f"{p}: {t}" if style.typed else p for p, t in params)
    arrow = f" -> {entry.returns}" if style.typed else ""
    cases = _cases(rng, entry, rng.randint(2, 3))
    if style.tests == "doctest":
        shown = "".join(f"\n    >>> {name}({a})\n    {r}" for a, r in cases)
        doc = f"{doc}\n{shown}\n    "
    return f'def {name}({signature}){arrow}:\n    """{doc}"""\n{body}{_tests(style, name, cases)}'


def _sequence(rng: random.Random, chapter: str, count: int) -> list[Entry]:
    """Walk through a chapter and on into others; no entry comes twice."""
    order = list(chapters())
    first = order.index(chapter)
    walk = [e for i in range(len(order)) for e in chapters()[order[(first + i) % len(order)]]]
    start = 0 if rng.random() < 0.5 else rng.randrange(len(chapters()[chapter]))
    walk = walk[start:] + walk[:start]
    kept = [e for i, e in enumerate(walk) if i == 0 or rng.random() < 0.7]
    return kept[:count]


def document(rng: random.Random) -> str:
    """Render one file: a title and several functions of a chapter."""
    chapter = rng.choice(list(chapters()))
    style = _Style(rng.choice(["assert", "assert", "test", "print", "doctest"]), rng.random() < 0.6)
    title = rng.choice(_TITLES[chapter].split("|"))
    place = rng.choice(["lesson", "part", "notebook", "chapter", "unit"])
    head = f'"""{title[0].upper()}{title[1:]}, {place} {rng.randint(1, 999)}."""\n'
    entries = _sequence(rng, chapter, rng.randint(8, 20))
    return head + "".join(f"\n\n{function(rng, e, style)}" for e in entries)
