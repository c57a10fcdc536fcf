-- needs: session
-- ARGV: latest deadline, that of one that sleeps, whose, whom they make room for (0: anybody, 1: their
-- own, 2: bytes); if for anybody: whether one goes whose GET stream was open
local times = redis.call('HMGET', base, 'expires', 'ends', 'mode', 'owner', 'current', 'opened')
if not times[1] then
    return { 'gone' }
end
local expires, ends, mode = times[1], times[2], times[3]
local is_asleep, is_unused = has_come(expires, ARGV[2]), has_come(expires, ARGV[1])
if not (is_asleep or is_unused) then
    return { 'later', expires }
end

local function goes()
    if ARGV[4] == '2' then
        return is_asleep
    end
    if (mode == 'transport' or mode == 'protocol') and is_asleep then
        return ARGV[4] == '0' or times[4] == ARGV[3]
    end
    if times[4] ~= ARGV[3] or not is_unused then
        return false
    end
    if ARGV[4] == '1' then
        return mode == 'conversation' or mode == 'keys'
    end
    return mode == 'transport' and not times[5] and (not times[6] or ARGV[5] == '1')
        and redis.call('EXISTS', base .. ':u', base .. ':c') == 0
end

-- Where the lifetime ends first, nobody knows when it was used.
if has_come(ends, expires) or not goes() then
    return { 'kept' }
end
local found, tokens = whole_record(), redis.call('HGETALL', base .. ':u')
delete()
return { 'over', found, tokens }
